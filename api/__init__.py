"""The API's side: requests made of pictures and text, sent to an engine."""

from api.errors import ApiError, PictureError
from api.pictures import ernie_patches, make_request, qwen_patches, sample_pictures

__all__ = ["ApiError", "PictureError", "ernie_patches", "make_request", "qwen_patches", "sample_pictures"]
