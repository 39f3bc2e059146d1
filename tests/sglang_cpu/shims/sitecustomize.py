"""SGLang imports torchvision, whose operators do not load beside a CPU torch of another version: declared here, so that
the import passes. Nothing calls them for a text model."""

import torch

_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
