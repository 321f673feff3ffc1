"""``quark.contrib.llm_eval``: AMD Quark's evaluation of language models, by `quark.evaluate`."""

from __future__ import annotations

from quark.compat.not_offered import not_offered
from quark.contrib.llm_eval.evaluation import eval_model, ppl_eval, ppl_eval_for_kv_cache, task_eval

__all__ = [
    "eval_model",
    "meteor_eval",
    "mlperf_rouge_eval",
    "ppl_eval",
    "ppl_eval_for_kv_cache",
    "ppl_eval_with_synthetic_dataset",
    "rouge_eval",
    "rouge_meteor_generations",
    "task_eval",
]

_TASKS = "use tasks of lm-evaluation-harness, as with quark evaluate --tasks"
meteor_eval = not_offered("meteor_eval", _TASKS)
mlperf_rouge_eval = not_offered("mlperf_rouge_eval", _TASKS)
ppl_eval_with_synthetic_dataset = not_offered("ppl_eval_with_synthetic_dataset", "use ppl_eval, or quark evaluate --text with your text")
rouge_eval = not_offered("rouge_eval", _TASKS)
rouge_meteor_generations = not_offered("rouge_meteor_generations", _TASKS)
