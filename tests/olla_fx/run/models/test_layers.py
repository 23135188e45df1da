"""Layers of all kinds train as in eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.harness import WholeStep, check_inference
from tests.olla_fx.helpers import ADAMW, MOMENTUM, Written, images, mlp, pairs, vectors


def sequences(count=3, batch=2, length=4, width=8):
    return [(torch.randn(batch, length, width), torch.randint(width, (batch,))) for _ in range(count)]


def tokens(count=3, size=10, shape=(4, 3), classes=3):
    return [(torch.randint(size, shape), torch.randint(classes, (shape[0],))) for _ in range(count)]


def recurrent(kind, **options):
    directions = 2 if options.get("bidirectional") else 1
    return Written(
        lambda self, x: self.head(self.body(x)[0][:, -1]),
        body=kind(4, 6, batch_first=True, **options),
        head=nn.Linear(6 * directions, 2),
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.RNN, {}),
        (nn.GRU, {}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.GRU, {"num_layers": 2, "dropout": 0.2}),
    ],
)
def test_recurrent_networks(kind, options):
    WholeStep(recurrent(kind, **options), MOMENTUM, pairs((2, 3, 4), (2, 2))[0], F.mse_loss).run(
        pairs((2, 3, 4), (2, 2))
    )


def test_lstm_without_onednn():
    batches = pairs((2, 3, 4), (2, 2))
    with torch.backends.mkldnn.flags(enabled=False):
        WholeStep(recurrent(nn.LSTM, num_layers=2, dropout=0.2), MOMENTUM, batches[0], F.mse_loss).run(
            batches
        )


def test_lstm_cell():
    def forward(self, x):
        hidden = cell = torch.zeros(2, 6)
        for time in range(3):
            hidden, cell = self.cell(x[:, time], (hidden, cell))
        return self.head(hidden)

    model = Written(forward, cell=nn.LSTMCell(4, 6), head=nn.Linear(6, 2))
    WholeStep(model, ADAMW, pairs((2, 3, 4), (2, 2))[0], F.mse_loss).run(pairs((2, 3, 4), (2, 2)))


def test_lstm_inference():
    check_inference(nn.LSTM(4, 6, 2), [(torch.randn(3, 2, 4),) for _ in range(3)], 3)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention(need_weights):
    model = Written(
        lambda self, x: self.body(x, x, x, need_weights=need_weights)[0].mean(1),
        body=nn.MultiheadAttention(8, 2, dropout=0.1 * need_weights, batch_first=True),
    )
    WholeStep(model, ADAMW, sequences(1)[0]).run(sequences())


def test_transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Written(lambda self, x: self.body(x).mean(1), body=nn.TransformerEncoder(layer, 2))
    WholeStep(model, ADAMW, sequences(1)[0]).run(sequences())


def classifier(*layers, width=144):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 5))


@pytest.mark.parametrize(
    "model",
    [
        classifier(nn.Dropout2d(0.3), nn.Conv2d(3, 4, 3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.3)),
        classifier(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
        classifier(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        classifier(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU6(True), nn.Hardswish(True)),
        classifier(nn.Conv2d(3, 4, 3, 2), nn.ConvTranspose2d(4, 3, 3), nn.LeakyReLU(0.1, True), width=75),
        classifier(nn.Flatten(1, 2), nn.Conv1d(24, 4, 3, padding=1, padding_mode="circular"), width=32),
        classifier(nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8), nn.GELU(), width=192),
        classifier(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, 2), nn.MaxPool3d(2), width=18),
    ],
    ids=["dropouts", "free", "instance", "in place", "autoencoder", "conv1d", "layer norm", "conv3d"],
)
def test_layers(model):
    WholeStep(model, MOMENTUM, images(1)[0]).run(images(4))


@pytest.mark.parametrize("p", [0.04, 0.085, 0.1, 0.857, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dropout_scales_as_eager_does(p, dtype):
    """1 / (1 - p) in double precision and then rounded is not always 1 divided by a rounded 1 - p."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(p), nn.Linear(64, 3)).to(dtype)
    batches = [(x.to(dtype), y) for x, y in vectors(2)]
    WholeStep(model, MOMENTUM, batches[0]).run(batches)


def test_one_batch_norm_used_twice():
    def forward(self, x):
        return self.head(self.norm(self.second(F.relu(self.norm(self.first(x))))).flatten(1))

    model = Written(
        forward,
        first=nn.Conv2d(3, 4, 3),
        second=nn.Conv2d(4, 4, 1),
        norm=nn.BatchNorm2d(4),
        head=nn.Linear(144, 5),
    )
    WholeStep(model, MOMENTUM, images(1)[0]).run(images(4))


@pytest.mark.parametrize(
    "body",
    [
        nn.EmbeddingBag(10, 6, mode="mean"),
        nn.Sequential(
            nn.Embedding(10, 6, padding_idx=0, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(18, 6)
        ),
    ],
    ids=["bag", "padding"],
)
def test_embeddings(body):
    WholeStep(nn.Sequential(body, nn.Linear(6, 3)), ADAMW, tokens(1)[0]).run(tokens())


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.7])),
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.7]), label_smoothing=0.1),
        lambda answer, target: F.nll_loss(answer.log_softmax(1), target).reshape(1),
        lambda answer, target: F.multi_margin_loss(answer, target),
    ],
    ids=["weighted", "weighted and smoothed", "one element", "margin"],
)
def test_losses(loss_fn):
    WholeStep(mlp(), MOMENTUM, vectors(1)[0], loss_fn).run(vectors(3))
