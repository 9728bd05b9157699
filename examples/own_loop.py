"""Run the search and the fine-tuning with distillation inside your own training loop.

python examples/own_loop.py [EPOCHS]
"""

import sys

import torch
from torch import nn

import compress
from compress.cli.quickstart import train_network
from compress.data import loaders
from compress.recipe import Data

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
train, val = loaders(Data(source="digits", batch_size=64))
model = train_network(epochs)
recipe = {"budget": {"macs": "50%"}, "search": {"method": "netslim", "epochs": 1, "lr": 0.02}}

session = compress.search_session(model, recipe, steps=epochs * len(train), example_inputs=next(iter(train))[0])
for epoch in range(epochs):
    for batch in train:
        terms = session.step(batch)  # forward, backward, update weights and scores
    print(f"epoch {epoch}: " + "  ".join(f"{name} {value:.4f}" for name, value in terms.items()))
pruned = session.finish()  # choose by the budget, fold, slice: a plain module

student, teacher = pruned.model, model.eval()
optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9)
for _ in range(epochs):
    student.train()
    for images, labels in train:
        with torch.no_grad():
            teacher_logits = teacher(images)
        logits = student(images)
        loss = nn.functional.cross_entropy(logits, labels)
        loss = loss + 8 * compress.distillation(logits, teacher_logits, temperature=4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
student.eval()
hits = sum(int((student(images).argmax(1) == labels).sum()) for images, labels in val)
left = pruned.report.pruned.macs / pruned.report.dense.macs
print(f"accuracy {100 * hits / len(val.dataset):.1f} % with {100 * left:.0f} % of the MACs")
