from typing import NoReturn

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]


def pil_to_tensor(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("torchvision.transforms.functional.pil_to_tensor needs torchvision itself")
