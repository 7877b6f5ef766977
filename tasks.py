"""Where `invoke` looks for tasks; they are in controller/tasks.py."""

from controller.tasks import namespace as namespace
