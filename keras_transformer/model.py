"""The model (figure 1). Shapes: inp (batch, inp_len) and tar (batch, tar_len) are ids, 0 = padding."""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_transformer.calls import ExplicitCall
from keras_transformer.ids import check_ids
from keras_transformer.layers import DecoderLayer, EncoderLayer, LayerState, layer_normalization
from keras_transformer.masks import create_masks, create_padding_mask
from keras_transformer.positions import PositionalEncoding


class Stack(ExplicitCall, keras.layers.Layer):
    """What Encoder and Decoder share: ids become vectors with positions and pass through layers.

    Args:
        num_layers: how many layers.
        d_model, num_heads, dff: the sizes of each.
        vocab_size: the number of ids.
        maximum_position_encoding: the longest sequence.
        rate, norm, activation, attention_rate, ffn_rate, norm_epsilon: as in ResidualLayer; rate is applied to the
            embeddings too.
        scale_embeddings: whether to multiply the embeddings by sqrt(d_model) (section 3.4).
        embedding: an Embedding to look the ids up with (the decoder may share the encoder's); None for one of its own.
    """

    def __init__(
        self,
        num_layers,
        d_model,
        num_heads,
        dff,
        vocab_size,
        maximum_position_encoding,
        rate,
        norm,
        activation,
        attention_rate,
        ffn_rate,
        norm_epsilon,
        scale_embeddings,
        embedding,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_layers = num_layers
        self.d_model = d_model
        self.num_heads = num_heads
        self.dff = dff
        self.maximum_position_encoding = maximum_position_encoding
        self.rate = rate
        self.norm = norm
        self.activation = activation
        self.attention_rate = attention_rate
        self.ffn_rate = ffn_rate
        self.norm_epsilon = norm_epsilon
        self.scale_embeddings = scale_embeddings
        policy = self.dtype_policy
        # Variance 1 / d_model: times sqrt(d_model) it stands beside the positions, and as the tied projection it gives
        # logits of variance 1.
        initializer = keras.initializers.RandomNormal(stddev=d_model**-0.5)
        self.embedding = embedding or keras.layers.Embedding(
            vocab_size, d_model, embeddings_initializer=initializer, name="embedding", dtype=policy
        )
        self.pos_encoding = PositionalEncoding(maximum_position_encoding, d_model, name="pos_encoding", dtype=policy)
        self.dropout = keras.layers.Dropout(rate, name="dropout", dtype=policy)
        self.layernorm = layer_normalization(norm_epsilon, "layernorm", policy) if norm == "pre" else None

    def make_layers(self, layer_class, name):
        arguments = (self.d_model, self.num_heads, self.dff, self.rate, self.norm)
        arguments += (self.activation, self.attention_rate, self.ffn_rate, self.norm_epsilon)
        return [layer_class(*arguments, name=f"{name}{i + 1}", dtype=self.dtype_policy) for i in range(self.num_layers)]

    def build_layers(self, layers, ids_shape, *shapes):
        self.embedding.build(ids_shape)
        for layer in layers:
            layer.build((*ids_shape, self.d_model), *shapes)
        if self.layernorm is not None:
            self.layernorm.build((*ids_shape, self.d_model))
        self.built = True

    def embed(self, ids, training):
        """dropout(embedding * sqrt(d_model) + position) (sections 3.4 and 3.5), (batch, seq_len, d_model)."""
        ids = check_ids(ids, self.embedding.input_dim, self.name)
        return self.dropout(self.look_up(ids), training=training)

    def look_up(self, ids, start=0):
        """The vectors of ids (batch, seq_len) at the positions from `start` on."""
        x = self.embedding(ids)
        return self.pos_encoding(x * self.d_model**0.5 if self.scale_embeddings else x, start)

    def normalize(self, x):
        """With norm="pre" the last residual sum has not been normalised yet."""
        return x if self.layernorm is None else self.layernorm(x)

    def get_config(self):
        names = ("num_layers", "d_model", "num_heads", "dff", "maximum_position_encoding", "rate", "norm")
        names += ("activation", "attention_rate", "ffn_rate", "norm_epsilon", "scale_embeddings")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable(package="keras_transformer")
class Encoder(Stack):
    """Embedding, positions and num_layers EncoderLayers; the arguments are Stack's.

    Call arguments, in this order:
        x: ids (batch, inp_len).
        training: whether to apply dropout.
        mask: broadcast to (batch, num_heads, inp_len, inp_len); 1 = blocked.

    Returns:
        (batch, inp_len, d_model).
    """

    def __init__(
        self,
        num_layers,
        d_model,
        num_heads,
        dff,
        input_vocab_size,
        maximum_position_encoding,
        rate=0.1,
        norm="post",
        activation="relu",
        attention_rate=0.0,
        ffn_rate=0.0,
        norm_epsilon=1e-6,
        scale_embeddings=True,
        **kwargs,
    ):
        super().__init__(
            num_layers, d_model, num_heads, dff, input_vocab_size, maximum_position_encoding, rate, norm, activation,
            attention_rate, ffn_rate, norm_epsilon, scale_embeddings, None, **kwargs,
        )  # fmt: skip
        self.input_vocab_size = input_vocab_size
        self.enc_layers = self.make_layers(EncoderLayer, "enc_layer")

    def build(self, x_shape):
        self.build_layers(self.enc_layers, x_shape)

    def call(self, x, training=None, mask=None):
        x = self.embed(x, training)
        for layer in self.enc_layers:
            x = layer(x, training, mask)
        return self.normalize(x)

    def get_config(self):
        return {**super().get_config(), "input_vocab_size": self.input_vocab_size}


class DecoderState(NamedTuple):
    """What the decoder keeps between two tokens; every tensor has the batch first, but for keys and values with room.

    layers: a LayerState for each layer.
    padding_mask: the source's, (batch, num_heads, beam_size, inp_len), True = blocked.
    ancestors: (batch, beam_size, tar_len), the slot of the beam in which each token of a hypothesis was decoded. The
        keys and values stay in the slots where they were made: when hypotheses change places, only this is reordered.
        Left empty where there is room for tokens to come.
    """

    layers: tuple[LayerState, ...]
    padding_mask: Any
    ancestors: Any


@keras.saving.register_keras_serializable(package="keras_transformer")
class Decoder(Stack):
    """Embedding, positions and num_layers DecoderLayers; the arguments are Stack's.

    Call arguments, in this order:
        x: ids (batch, tar_len), beginning with the start id.
        enc_output: (batch, inp_len, d_model).
        training: whether to apply dropout.
        look_ahead_mask: broadcast to (batch, num_heads, tar_len, tar_len); 1 = blocked.
        padding_mask: the source's padding, broadcast to (batch, num_heads, tar_len, inp_len); 1 = blocked.

    Returns:
        x: (batch, tar_len, d_model).
        attention_weights: {"decoder_layer1_block1": (batch, num_heads, tar_len, tar_len), "decoder_layer1_block2":
            (batch, num_heads, tar_len, inp_len), ...}, the self-attention and the attention to the source.
    """

    def __init__(
        self,
        num_layers,
        d_model,
        num_heads,
        dff,
        target_vocab_size,
        maximum_position_encoding,
        rate=0.1,
        norm="post",
        activation="relu",
        attention_rate=0.0,
        ffn_rate=0.0,
        norm_epsilon=1e-6,
        scale_embeddings=True,
        embedding=None,
        **kwargs,
    ):
        super().__init__(
            num_layers, d_model, num_heads, dff, target_vocab_size, maximum_position_encoding, rate, norm, activation,
            attention_rate, ffn_rate, norm_epsilon, scale_embeddings, embedding, **kwargs,
        )  # fmt: skip
        self.target_vocab_size = target_vocab_size
        self.dec_layers = self.make_layers(DecoderLayer, "dec_layer")

    def build(self, x_shape, enc_output_shape):
        self.build_layers(self.dec_layers, x_shape, enc_output_shape)

    def call(self, x, enc_output, training=None, look_ahead_mask=None, padding_mask=None):
        attention_weights = {}
        x = self.embed(x, training)
        for i, layer in enumerate(self.dec_layers, 1):
            x, block1, block2 = layer(x, enc_output, training, look_ahead_mask, padding_mask)
            attention_weights[f"decoder_layer{i}_block1"] = block1
            attention_weights[f"decoder_layer{i}_block2"] = block2
        return self.normalize(x), attention_weights

    def init_state(self, enc_output, padding_mask, beam_size=1, room=None) -> DecoderState:
        """The state before the first token, from the encoder's output and the source's padding mask.

        With `room`, of a beam of one, it has the size of so many tokens, and keeps it.
        """
        batch_size, inp_len, _ = ops.shape(enc_output)
        # At its full shape: that is faster than to broadcast it in every layer at every token.
        padding_mask = ops.broadcast_to(
            ops.cast(padding_mask, "bool"), (batch_size, self.num_heads, beam_size, inp_len)
        )
        ancestors = ops.zeros((batch_size, beam_size, 0), "int32")
        layers = tuple(layer.init_state(enc_output, room) for layer in self.dec_layers)
        return DecoderState(layers, padding_mask, ancestors)

    def step(self, tokens, parents, state, fused_weights, place=None):
        """One token of each hypothesis to its vector, (batch * beam_size, d_model), and the state with it.

        Args:
            tokens: the newest ids, (batch, beam_size).
            parents: the slot of the hypothesis before that each of them goes on from, (batch, beam_size).
            state: the state before.
            fused_weights: `MultiHeadAttention.fused_weights` of each layer's mha1.
            place: how many tokens there were before, for a state with room.
        """
        batch_size, beam_size = ops.shape(tokens)
        tar_len = ops.shape(state.ancestors)[2] if place is None else place
        alone = tokens.shape[1] == 1
        slots = ops.arange(beam_size, dtype="int32")
        ancestors = state.ancestors
        if not alone:
            rows = ops.arange(batch_size, dtype="int32")[:, None] * beam_size + parents
            ancestors = ops.take(ops.reshape(ancestors, (batch_size * beam_size, tar_len)), rows, 0)
        mask = None
        if place is None:
            ancestors = ops.concatenate([ancestors, ops.broadcast_to(slots[:, None], (batch_size, beam_size, 1))], 2)
        else:
            mask = ops.arange(ops.shape(state.layers[0].values)[1], dtype="int32") > place
        if not alone:
            others = ops.not_equal(ancestors[..., None], slots)  # (batch, beam_size, tar_len + 1, beam_size)
            others = ops.reshape(others, (batch_size, 1, beam_size, (tar_len + 1) * beam_size))
            mask = ops.broadcast_to(others, (batch_size, self.num_heads, beam_size, (tar_len + 1) * beam_size))
        x = self.look_up(ops.reshape(tokens, (batch_size * beam_size, 1)), tar_len)[:, 0]
        layers = []
        for layer, layer_state, weights in zip(self.dec_layers, state.layers, fused_weights, strict=True):
            x, layer_state = layer.step(x, layer_state, mask, state.padding_mask, beam_size, weights, place)
            layers.append(layer_state)
        return self.normalize(x), DecoderState(tuple(layers), state.padding_mask, ancestors)

    def get_config(self):
        return {**super().get_config(), "target_vocab_size": self.target_vocab_size}


@keras.saving.register_keras_serializable(package="keras_transformer")
class Transformer(ExplicitCall, keras.Model):
    """Encoder, decoder and the projection onto the target vocabulary.

    Two doors lead in:
    - `transformer(inp, tar, training, enc_padding_mask, look_ahead_mask, dec_padding_mask)` returns (logits,
      attention_weights).
    - `transformer((inp, tar))`, one structure as Keras passes it, returns the logits alone: so `compile`, `fit` on
      ((inp, tar_inp), tar_real), `predict`, `evaluate` and `export` are plain Keras.
    Masks left out are made from the ids.

    Args:
        num_layers, d_model, num_heads, dff: the sizes of encoder and decoder.
        input_vocab_size, target_vocab_size: the numbers of ids.
        pe_input, pe_target: the longest source and the longest decoder input.
        rate: dropout on each sublayer's output and on the embeddings (section 5.4).
        norm: "post" (the paper) or "pre".
        activation: of the feed-forward networks, as Keras names it.
        share_embeddings: one matrix for source ids, target ids and projection (section 3.4); equal vocabularies only.
        attention_rate: dropout on the attention weights.
        ffn_rate: dropout inside the feed-forward networks.
        norm_epsilon: added to the variance when normalising.
        scale_embeddings: whether to multiply the embeddings by sqrt(d_model) (section 3.4).
        output_bias: whether the projection adds a bias to the logits when it is the embeddings'; one of its own always
            does.

    Call arguments, in this order:
        inp: source ids (batch, inp_len), or the pair (inp, tar).
        tar: the decoder's input ids (batch, tar_len), beginning with the start id.
        training: whether to apply dropout.
        enc_padding_mask, look_ahead_mask, dec_padding_mask: as `create_masks` makes them; 1 = blocked.

    Returns:
        logits: (batch, tar_len, target_vocab_size), float32 under mixed precision too.
        attention_weights: as Decoder gives them.
    """

    def __init__(
        self,
        num_layers,
        d_model,
        num_heads,
        dff,
        input_vocab_size,
        target_vocab_size,
        pe_input,
        pe_target,
        rate=0.1,
        norm="post",
        activation="relu",
        share_embeddings=False,
        attention_rate=0.0,
        ffn_rate=0.0,
        norm_epsilon=1e-6,
        scale_embeddings=True,
        output_bias=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if share_embeddings and input_vocab_size != target_vocab_size:
            raise ValueError(
                "share_embeddings needs one vocabulary for both sides, "
                f"got input_vocab_size={input_vocab_size} and target_vocab_size={target_vocab_size}"
            )
        self.num_layers = num_layers
        self.d_model = d_model
        self.num_heads = num_heads
        self.dff = dff
        self.input_vocab_size = input_vocab_size
        self.target_vocab_size = target_vocab_size
        self.pe_input = pe_input
        self.pe_target = pe_target
        self.rate = rate
        self.norm = norm
        self.activation = activation
        self.share_embeddings = share_embeddings
        self.attention_rate = attention_rate
        self.ffn_rate = ffn_rate
        self.norm_epsilon = norm_epsilon
        self.scale_embeddings = scale_embeddings
        self.output_bias = output_bias
        sizes = (num_layers, d_model, num_heads, dff)
        options = (rate, norm, activation, attention_rate, ffn_rate, norm_epsilon, scale_embeddings)
        policy = self.dtype_policy
        self.encoder = Encoder(*sizes, input_vocab_size, pe_input, *options, name="encoder", dtype=policy)
        shared = self.encoder.embedding if share_embeddings else None
        self.decoder = Decoder(*sizes, target_vocab_size, pe_target, *options, shared, name="decoder", dtype=policy)
        if not share_embeddings:
            self.final_layer = keras.layers.Dense(target_vocab_size, name="final_layer", dtype=policy)

    def build(self, inp_shape, tar_shape=None):
        if tar_shape is None:
            inp_shape, tar_shape = inp_shape
        self.encoder.build(tuple(inp_shape))
        self.decoder.build(tuple(tar_shape), (*inp_shape, self.d_model))
        if not self.share_embeddings:
            self.final_layer.build((*tar_shape, self.d_model))
        self.final_bias = None
        if self.share_embeddings and self.output_bias:
            self.final_bias = self.add_weight((self.target_vocab_size,), initializer="zeros", name="final_bias")
        self.built = True

    def encode(self, inp, training=None, enc_padding_mask=None):
        """Source ids to the encoder's output, (batch, inp_len, d_model)."""
        if enc_padding_mask is None:
            enc_padding_mask = create_padding_mask(inp)
        return self.encoder(inp, training, enc_padding_mask)

    def decode(self, tar, enc_output, training=None, look_ahead_mask=None, dec_padding_mask=None):
        """Decoder input ids and the encoder's output to vectors (batch, tar_len, d_model) and attention weights."""
        return self.decoder(tar, enc_output, training, look_ahead_mask, dec_padding_mask)

    def init_state(self, enc_output, dec_padding_mask, beam_size=1, room=None) -> DecoderState:
        """What `step` keeps between two tokens, before the first, for `beam_size` hypotheses of each source.

        Args:
            enc_output: of `encode`, (batch, inp_len, d_model).
            dec_padding_mask: the source's padding, broadcast to (batch, num_heads, beam_size, inp_len); 1 = blocked.
            room: the most tokens there will be, for a state that keeps its shapes, as XLA wants it; of a beam of one.
                None for one that grows, which costs less.
        """
        return self.decoder.init_state(enc_output, dec_padding_mask, beam_size, room)

    def step_weights(self):
        """The weights that `step` multiplies by in another layout than theirs, to be made once and not at each token.

        Returns:
            fused: `MultiHeadAttention.fused_weights` of each decoder layer.
            projection: the kernel (d_model, target_vocab_size), if it is the embeddings'; else nothing.
        """
        fused = tuple(layer.mha1.fused_weights() for layer in self.decoder.dec_layers)
        return fused, self.projection()[:1] if self.share_embeddings else ()

    def step(self, tokens, parents, state, step_weights=None, place=None):
        """One token of each hypothesis: the logits of the next, at the cost of one token.

        The same numbers as `decode` and `project` of the whole give, which look at everything again.

        Args:
            tokens: the newest ids, (batch, beam_size); the start id at first.
            parents: the slot of the hypothesis before that each goes on from, (batch, beam_size); with a beam of one,
                it is not looked at.
            state: of `init_state`, or of the step before.
            step_weights: what the method of that name gives; None to make them here.
            place: how many tokens there were before, for a state with room.

        Returns:
            logits: (batch, beam_size, target_vocab_size), float32 under mixed precision too.
            state: with this token.
        """
        fused, projection = step_weights or self.step_weights()
        x, state = self.decoder.step(tokens, parents, state, fused, place)
        logits = self.project(x, *projection)
        return ops.reshape(logits, (*ops.shape(tokens), self.target_vocab_size)), state

    def projection(self):
        """What vectors are multiplied by for their logits, (d_model, target_vocab_size), and what is added, or None."""
        if self.share_embeddings:
            return ops.transpose(self.decoder.embedding.embeddings), self.final_bias
        return self.final_layer.kernel, self.final_layer.bias

    def project(self, x, kernel=None):
        """Vectors (..., d_model) to logits (..., target_vocab_size); `kernel` as `step_weights` gives it."""
        if self.share_embeddings:
            logits = ops.matmul(x, self.projection()[0] if kernel is None else kernel)
            logits = logits if self.final_bias is None else logits + ops.cast(self.final_bias, logits.dtype)
        else:
            logits = self.final_layer(x)
        return ops.cast(logits, keras.backend.result_type(logits.dtype, "float32"))

    def call(self, inp, tar=None, training=None, enc_padding_mask=None, look_ahead_mask=None, dec_padding_mask=None):
        logits_alone = tar is None
        if logits_alone:
            inp, tar = inp
        enc_mask, look_mask, dec_mask = create_masks(inp, tar)
        enc_output = self.encode(inp, training, enc_mask if enc_padding_mask is None else enc_padding_mask)
        x, attention_weights = self.decode(
            tar,
            enc_output,
            training,
            look_mask if look_ahead_mask is None else look_ahead_mask,
            dec_mask if dec_padding_mask is None else dec_padding_mask,
        )
        logits = self.project(x)
        return logits if logits_alone else (logits, attention_weights)

    def get_config(self):
        names = ("num_layers", "d_model", "num_heads", "dff", "input_vocab_size", "target_vocab_size", "pe_input")
        names += ("pe_target", "rate", "norm", "activation", "share_embeddings", "attention_rate", "ffn_rate")
        names += ("norm_epsilon", "scale_embeddings", "output_bias")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
