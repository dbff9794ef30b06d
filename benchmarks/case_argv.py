"""A case as Megatron-LM's command line, written by the product's own `argv` methods."""

from __future__ import annotations

from typing import Any

from search_spaces.case import read_case


def case_argv(case: dict[str, Any], megatron: str = "0.16") -> list[str]:
    """The arguments of a launch of this case.

    Raises:
        search_spaces.case.IllegalCaseError: the case has no command line that the product would write.
    """
    workload, config = read_case(case, megatron)
    settings = workload.settings
    argv = [*workload.model.argv(), *config.argv()]
    if workload.model.max_position_embeddings is None:
        argv += ["--max-position-embeddings", str(workload.seq_length)]
    argv += ["--seq-length", str(workload.seq_length), "--global-batch-size", str(workload.global_batch_size)]
    argv += ["--train-iters", str(settings.train_iters), "--lr-warmup-iters", str(settings.lr_warmup_iters)]
    argv += ["--lr-decay-style", settings.lr_decay_style]
    if settings.lr_wsd_decay_iters is not None:
        argv += ["--lr-wsd-decay-iters", str(settings.lr_wsd_decay_iters)]
    if settings.lr_warmup_fraction is not None:
        argv += ["--lr-warmup-fraction", str(settings.lr_warmup_fraction)]
    if settings.rampup_batch_size is not None:
        argv += ["--rampup-batch-size", *map(str, settings.rampup_batch_size)]
    return [*argv, "--optimizer", settings.optimizer, *_ALWAYS]


_ALWAYS = (
    *"--lr 1e-4 --min-lr 1e-5 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --no-rope-fusion".split(),  # noqa: SIM905  as on a command line
    *"--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion".split(),  # noqa: SIM905  as on a command line
    *"--hidden-dropout 0 --attention-dropout 0".split(),  # noqa: SIM905  as on a command line
)
