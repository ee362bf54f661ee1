"""Masks: 1 (or True) = blocked, 0 = may be attended to; they broadcast to (batch, num_heads, seq_len_q, seq_len_k)."""

from keras import ops

from keras_transformer.ids import PAD


def create_padding_mask(seq):
    """Block the padding of `seq`, ids (batch, seq_len); float32 (batch, 1, 1, seq_len)."""
    return ops.cast(ops.equal(seq, PAD), "float32")[:, None, None, :]


def create_look_ahead_mask(size):
    """Block, for each position, those after it (section 3.2.3); float32 (size, size)."""
    positions = ops.arange(size)
    return ops.cast(positions[None, :] > positions[:, None], "float32")


def create_length_mask(valid_lens, size):
    """Block the positions at and after each row's length, (batch,) integers; float32 (batch, 1, 1, size)."""
    lengths = ops.cast(valid_lens, "int32")
    return ops.cast(ops.arange(size)[None, :] >= lengths[:, None], "float32")[:, None, None, :]


def create_masks(inp, tar):
    """The three masks of a Transformer, from source ids (batch, inp_len) and decoder input ids (batch, tar_len).

    Returns:
        enc_padding_mask: (batch, 1, 1, inp_len), for the encoder's self-attention.
        look_ahead_mask: (batch, 1, tar_len, tar_len), later positions and padding, for the decoder's self-attention.
        dec_padding_mask: (batch, 1, 1, inp_len), for the decoder's attention to the encoder's output: the source's
            padding, whatever the target's length.
    """
    padding_mask = create_padding_mask(inp)
    look_ahead_mask = ops.maximum(create_padding_mask(tar), create_look_ahead_mask(ops.shape(tar)[1]))
    return padding_mask, look_ahead_mask, padding_mask
