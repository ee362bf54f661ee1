"""How the layers are called: Keras 3 refuses `training` by position and passes masks of the opposite meaning along."""

import inspect

import keras


class ExplicitCall:
    """Mixin for Keras layers whose arguments may all be given by position and whose masks are always explicit.

    Keras 3 takes only tensors by position, so `layer(x, True, mask)` is bound to names first. Keras's implicit mask
    (True = attend) is the opposite of the masks here (1 = blocked): an input that carries one is refused unless the
    call says which mask it means.
    """

    def __call__(self, *args, **kwargs):
        arguments = {**inspect.signature(self.call).bind_partial(*args).arguments}
        for name in arguments.keys() & kwargs.keys():
            raise TypeError(f"{type(self).__name__} got two values for argument '{name}'")
        arguments.update(kwargs)
        if "mask" in inspect.signature(self.call).parameters and arguments.get("mask") is None:
            for x in keras.tree.flatten(arguments):
                if getattr(x, "_keras_mask", None) is not None:
                    raise ValueError(
                        f"{type(self).__name__} got an input with Keras's implicit mask (mask_zero=True), which it "
                        "does not use: pass mask=, where 1 is blocked, as create_padding_mask(ids) makes it"
                    )
        return super().__call__(**arguments)

    def compute_mask(self, inputs, previous_mask):
        """None, whatever comes in: no mask travels on with the outputs."""
        return None
