"""Lightning fits a module whose networks the callback plans as it fits the module itself, bit for bit."""

import copy
import pickle
import warnings

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx import CaptureError, OptionError
from olla_fx.integrations.lightning import OllaCallback
from tests.olla_fx.comparisons import assert_same, assert_same_models


class Fitted(lightning.LightningModule):
    """Says how it is trained and validated; keeps the losses."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def network(self, x):
        raise NotImplementedError

    def training_step(self, batch, index):
        return self.loss("train", *batch)

    def validation_step(self, batch, index):
        self.loss("validate", *batch)

    def loss(self, name, x, y):
        loss = F.cross_entropy(self.network(x), y)
        self.log(name, loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, outputs))


class WithForward(Fitted):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers(8, 16), layers(16, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())

    def network(self, x):
        return self(x)


class WithNetworks(WithForward):
    """Calls two networks in turn, one of them in a container, though it has a forward."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([self.second])
        del self.second

    def network(self, x):
        return self.parts[0](self.first(x).tanh())


class Logging(WithForward):
    """Has a forward that cannot be planned."""

    def forward(self, x):
        if self.training:
            self.seen = getattr(self, "seen", 0) + 1
        return super().forward(x)


class Poisoning(lightning.pytorch.callbacks.Callback):
    """Overwrites the free buffers before every batch, and notes what was planned."""

    def __init__(self, callback):
        self.callback, self.batches = callback, 0

    def on_train_batch_start(self, *_):
        for module in self.callback._calls.modules.values():
            if not module.stats.is_busy:
                module.poison()
                self.batches += 1


def fit(make, folder, callbacks=(), *, checkpoint=None, epochs=3, **arguments):
    lightning.seed_everything(0, verbose=False)
    model = make()
    dataset = torch.utils.data.TensorDataset(torch.randn(22, 8), torch.randint(3, (22,)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks), **arguments,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        trainer.fit(model, loader, loader, ckpt_path=checkpoint, weights_only=False)
    return model, trainer


def assert_same_fits(eager, planned):
    assert_same(eager.losses, planned.losses, "losses")
    assert_same_models(eager, planned)


@pytest.mark.parametrize("make", [WithForward, WithNetworks, Logging])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}],
    ids=["plain", "bf16", "accumulation"],
)
@pytest.mark.filterwarnings("ignore:Logging runs without a plan:RuntimeWarning")
def test_the_callback_plans_what_the_training_step_calls(make, arguments, tmp_path):
    eager, _ = fit(make, tmp_path / "eager", **arguments)
    callback = OllaCallback(solver="none")
    poisoning = Poisoning(callback)
    planned, trainer = fit(make, tmp_path / "planned", [callback, poisoning], **arguments)
    assert_same_fits(eager, planned)
    named = {WithForward: {""}, WithNetworks: {"first", "parts.0"}, Logging: {"first", "second"}}
    assert callback.plans.keys() == callback.stats.keys() == named[make]
    assert poisoning.batches > 0
    for stats in callback.stats.values():
        assert stats.binding == "buffer"
        assert stats.counts.outside == 0
        assert stats.eager_runs < 10  # of 18 and 20 calls
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert saved["state_dict"].keys() == eager.state_dict().keys()


@pytest.mark.filterwarnings("ignore:Logging runs without a plan:RuntimeWarning")
def test_resuming(tmp_path):
    fits = []
    for side, callbacks in (("eager", []), ("planned", [OllaCallback(solver="none")])):
        _, trainer = fit(WithForward, tmp_path / side, callbacks, epochs=1)
        saved = trainer.checkpoint_callback.best_model_path
        fits.append(fit(WithForward, tmp_path / side, callbacks, checkpoint=saved)[0])
    assert_same_fits(*fits)


def test_modules_by_name(tmp_path):
    eager, _ = fit(WithForward, tmp_path / "eager")
    callback = OllaCallback(["second"], solver="none")
    planned, _ = fit(WithForward, tmp_path / "planned", [callback])
    assert_same_fits(eager, planned)
    assert callback.plans.keys() == {"second"}
    with pytest.raises(CaptureError, match="has no module 'third': name some of '', 'first'"):
        fit(WithForward, tmp_path / "planned", [OllaCallback(["third"])])
    with pytest.raises(OptionError, match="patience"):
        OllaCallback(patience=1)


class Copying(lightning.pytorch.callbacks.Callback):
    """Copies and pickles the module in the middle, as averaging of weights does."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        x = torch.randn(4, 8)
        pl_module.eval()
        with torch.no_grad():
            expected = pl_module.forward(x)
            for other in (copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))):
                assert_same(expected, other(x), "the copy's answer")
                assert other._compiled_call_impl is None
        pl_module.train()


def test_copies_of_a_module_that_is_being_fitted(tmp_path):
    fit(WithForward, tmp_path, [OllaCallback(solver="none"), Copying()], epochs=1)


def test_an_error_lets_the_module_be_itself(tmp_path):
    class Failing(lightning.pytorch.callbacks.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            models.append(pl_module)
            raise RuntimeError("enough")

    models, callback = [], OllaCallback(solver="none")
    with pytest.raises(RuntimeError, match="enough"):
        fit(WithForward, tmp_path, [callback, Failing()])
    assert all(module._compiled_call_impl is None for module in models[0].modules())
    assert callback.plans.keys() == {""}


def test_a_strategy_for_several_processes(tmp_path):
    """It calls ``training_step`` as the forward of a wrapper."""
    callback = OllaCallback(solver="none")
    fits = []
    for side, callbacks in (("eager", []), ("planned", [callback])):
        fits.append(fit(WithForward, tmp_path / side, callbacks, strategy="ddp")[0])
        torch.distributed.destroy_process_group()
    assert_same_fits(*fits)
    assert callback.plans.keys() == {""}
    assert callback.stats[""].counts.served > 0
