# Cascade Mask R-CNN with a Swin-T backbone, as in the Swin paper (Liu et al. 2021): 4conv1fc heads, GIoU, SyncBN
#
#   compress prune --mmdet cascade-mask-rcnn_swin-t-p4-w7_fpn_3x_coco --checkpoint detector.pth \
#                  --recipe swin_t_cascade_40 --workdir out
#
# 86 M parameters, 28 M of them in the backbone. Multi-scale training, AdamW at 1e-4, batch 16, 36 epochs: mmdet's own
# settings for Mask R-CNN with this backbone, from which the data and the schedule come.
_base_ = [
    "mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py",
    "mmdet::_base_/datasets/coco_instance.py",
    "mmdet::_base_/schedules/schedule_1x.py",
    "mmdet::_base_/default_runtime.py",
]
pretrained = "https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_tiny_patch4_window7_224.pth"
widths = [96, 192, 384, 768]


def _head(spread):
    """One stage of the cascade; `spread` is the standard deviation of its boxes' offsets."""
    return dict(
        type="ConvFCBBoxHead",
        num_shared_convs=4,
        num_shared_fcs=1,
        in_channels=256,
        conv_out_channels=256,
        fc_out_channels=1024,
        roi_feat_size=7,
        num_classes=80,
        bbox_coder=dict(type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=spread),
        reg_class_agnostic=False,
        reg_decoded_bbox=True,
        norm_cfg=dict(type="SyncBN", requires_grad=True),
        loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
        loss_bbox=dict(type="GIoULoss", loss_weight=10.0),
    )


model = dict(
    backbone=dict(
        _delete_=True,
        type="SwinTransformer",
        embed_dims=96,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        drop_path_rate=0.2,
        out_indices=(0, 1, 2, 3),
        convert_weights=True,
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=dict(in_channels=widths),
    roi_head=dict(
        bbox_head=[
            _head([0.1, 0.1, 0.2, 0.2]),
            _head([0.05, 0.05, 0.1, 0.1]),
            _head([0.033, 0.033, 0.067, 0.067]),
        ]
    ),
)

scales = [(side, 1333) for side in range(480, 801, 32)]
resize = dict(type="RandomChoiceResize", scales=scales, keep_ratio=True)
crop = [
    dict(type="RandomChoiceResize", scales=[(400, 1333), (500, 1333), (600, 1333)], keep_ratio=True),
    dict(type="RandomCrop", crop_type="absolute_range", crop_size=(384, 600), allow_negative_crop=True),
    resize,
]
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="RandomChoice", transforms=[[resize], crop]),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))

max_epochs = 36
train_cfg = dict(max_epochs=max_epochs)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type="MultiStepLR", begin=0, end=max_epochs, by_epoch=True, milestones=[27, 33], gamma=0.1),
]
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            "absolute_pos_embed": dict(decay_mult=0.0),
            "relative_position_bias_table": dict(decay_mult=0.0),
            "norm": dict(decay_mult=0.0),
        }
    ),
    optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
)
