"""Data, tasks, loaders, pages and commands that several test modules share."""
