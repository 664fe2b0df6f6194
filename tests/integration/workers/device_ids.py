"""A Ray job: two actors with a GPU each print what a train worker learns of its device, and what its process sees."""

import json
import os

import ray

from workers.train_worker import _host_and_devices


@ray.remote(num_gpus=1)
class Actor:
    def devices(self) -> tuple[list[str], str]:
        return _host_and_devices()[1], os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    actors = [Actor.remote() for _ in range(2)]
    print(json.dumps(ray.get([actor.devices.remote() for actor in actors])))
