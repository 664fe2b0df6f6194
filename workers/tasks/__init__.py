from workers.tasks.task import Batch as Batch
from workers.tasks.task import Task as Task
from workers.tasks.task import TaskContext as TaskContext
from workers.tasks.task import build_task as build_task
from workers.tasks.task import own_errors as own_errors
from workers.tasks.task import tokens_in as tokens_in
