"""The catalogue: every cause of difference that memfit knows, each with its page.

The first digit names the part: 1 equality, 2 weights, 3 state, 4 randomness, 5 the group's
hygiene, 6 optimizers and schedules, 7 replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.verification import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is to be said of one code."""

    code: str
    severity: Severity
    title: str
    meaning: str
    """What it is and why it makes a difference."""
    remedy: str
    """What to do, in one sentence; shown with every finding."""
    example: str = ""
    """Code that is right, or the arithmetic in figures."""


_E, _W, _R = Severity.ERROR, Severity.WARNING, Severity.REMARK

_PAGES = (
    Page(
        code="MF101",
        severity=_E,
        title="the accumulated gradient is not that of the logical batch",
        meaning=(
            "From the same parameters and the same examples, the sum of the weighted gradients of "
            "the microbatches differs from the gradient of one physical batch by more than "
            "rounding explains, and none of the causes that memfit knows is there."
        ),
        remedy=(
            "compare the loss of one example alone with its loss in a batch, starting at the "
            "parameter that is named"
        ),
    ),
    Page(
        code="MF102",
        severity=_E,
        title="the optimizer step differs although the gradients are equal",
        meaning=(
            "One optimizer step from gradients that are equal within rounding led to other "
            "parameters: the optimizer draws random numbers, keeps state outside itself, or "
            "amplifies rounding."
        ),
        remedy="look for randomness and outside state in the optimizer that is built",
    ),
    Page(
        code="MF103",
        severity=_E,
        title="a gradient or loss is not finite",
        meaning=(
            "A NaN or an infinity in one microbatch makes the gradient of the whole group NaN. A "
            "mean over no elements (0/0), such as a microbatch whose every label is ignored, is "
            "the usual source; in the physical batch it would have had weight 0."
        ),
        remedy=(
            "divide the sum of the loss by the number of elements of the whole group, so that an "
            "empty microbatch counts 0, and check what batch() makes"
        ),
    ),
    Page(
        code="MF104",
        severity=_W,
        title="the batch cannot be split into microbatches of the same examples",
        meaning=(
            "Equality is a statement about the same examples, so one batch is drawn and cut along "
            "the dimension that grows with the number of examples. Here nothing in the batch does "
            "so, or its parts disagree; a packed sequence, for example, has no such dimension."
        ),
        remedy=(
            "let batch(m) return tensors (in dicts, tuples, dataclasses) that hold m examples "
            "along one dimension, or lists of m items"
        ),
    ),
    Page(
        code="MF105",
        severity=_W,
        title="the example leaves no gradient in some parameters",
        meaning=(
            "These parameters need a gradient and got none from the physical batch: they are not "
            "part of the loss. With DistributedDataParallel this is an error or a hang unless "
            "find_unused_parameters is set."
        ),
        remedy="use them in the loss, or freeze them with requires_grad_(False)",
    ),
    Page(
        code="MF106",
        severity=_W,
        title="an error of one percent in a microbatch's weight could hide behind rounding",
        meaning=(
            "What tells a wrong weight from rounding is how much of the gradient it is. Here the "
            "model runs in float32 only and makes much of rounding (saturated layers, large "
            "numbers that cancel), or one of the microbatches adds next to nothing to the "
            "gradient. Nothing was found wrong; smaller errors than the one named would not have "
            "been."
        ),
        remedy=(
            "let the model run in float64 (no fixed dtype, no kernel of float32 alone), or verify "
            "it with smaller inputs or another --seed"
        ),
    ),
    Page(
        code="MF201",
        severity=_E,
        title="a mean of means: microbatches with unequal elements count alike",
        meaning=(
            "The loss of a microbatch is a mean over its elements (tokens, say), and the "
            "microbatches are averaged as if all had the same number of them. 512 tokens at a "
            "loss of 2 and 1,536 at 4 have the mean (512*2 + 1536*4) / 2048 = 3.5; the mean of "
            "the two means is 3. Elements of short microbatches then weigh more than others."
        ),
        remedy=(
            "weight each microbatch's mean loss by n_i / N: its elements over those of the whole "
            "group (a workload says them by count())"
        ),
        example=(
            "N = sum(counts)\nfor microbatch, n in zip(microbatches, counts):\n"
            "    loss = mean_loss(model, microbatch) * n / N\n    loss.backward()"
        ),
    ),
    Page(
        code="MF202",
        severity=_E,
        title="the loss is a sum, not a mean",
        meaning=(
            "The loss grows with the number of elements. A group that weights its microbatches by "
            "n_i / N expects means; with sums its gradient is about 1/A of the physical batch's, "
            "and in a loop that does not divide, it grows with the batch."
        ),
        remedy=(
            "return the mean over the elements (reduction='mean'), or divide the sum by the "
            "number of elements of the whole group"
        ),
    ),
    Page(
        code="MF203",
        severity=_E,
        title="the loss is divided by the accumulation steps twice, or by a constant",
        meaning=(
            "The loss that is returned is already divided, and the group divides once more: the "
            "gradient is smaller than the logical batch's by that factor. Trainers such as "
            "Lightning, Accelerate and Transformers divide by themselves; an SGD step is then "
            "smaller by the factor, and Adam hides it except in clipping, decay and epsilon."
        ),
        remedy="divide once: either in the loss or in the loop that accumulates",
    ),
    Page(
        code="MF204",
        severity=_E,
        title="the microbatches' losses are added up, not averaged",
        meaning=(
            "Every microbatch's mean loss goes to backward undivided, so that the gradient of the "
            "group is A times that of the logical batch: the learning rate is in effect A times "
            "larger (SGD), and clipping acts A times earlier."
        ),
        remedy="multiply each mean loss by n_i / N before backward; with equal sizes, divide by A",
        example="(loss / accumulation_steps).backward()",
    ),
    Page(
        code="MF205",
        severity=_E,
        title="count() does not count what the loss is a mean over",
        meaning=(
            "The weights of the examples in the loss, as their gradients show them, are not in "
            "proportion to what count() returns. Counting padding or ignored labels that the loss "
            "leaves out is the usual cause."
        ),
        remedy="count exactly the elements that the loss averages: (labels != ignore_index).sum()",
        example="def count(self, batch):\n    return int((batch['labels'][:, 1:] != -100).sum())",
    ),
    Page(
        code="MF206",
        severity=_E,
        title="count() is no number of elements",
        meaning=(
            "A group's denominator is the sum of the counts of its microbatches, known before the "
            "first backward. A fraction, a tensor or a negative number counts nothing."
        ),
        remedy="return the number of elements that the loss is a mean over, as an int",
    ),
    Page(
        code="MF207",
        severity=_E,
        title="an incomplete last group is divided by a full group's denominator",
        meaning=(
            "The data ended inside a group, and its microbatches were still divided by the full "
            "number of accumulation steps: with 2 of 4 microbatches, the last step's gradient is "
            "half of its examples' mean."
        ),
        remedy="divide by the microbatches (or elements) that the last group has, or drop it",
    ),
    Page(
        code="MF208",
        severity=_W,
        title="the weights of the loss cannot be read",
        meaning=(
            "Where a loop is watched, memfit follows the loss that goes to backward down to its "
            "mean or sum, and reads the factors on the way. A compiled or custom loss cannot be "
            "followed, and so its weights stay unknown."
        ),
        remedy=(
            "verify the loss as a workload (model, batch, loss), or run the script without "
            "torch.compile"
        ),
    ),
    Page(
        code="MF209",
        severity=_W,
        title="the group's denominator is not the number of its elements",
        meaning=(
            "Every element of the group counts alike, so the direction is right, and yet the "
            "shares do not add up to one: the denominator counts elements that the loss leaves "
            "out. The length of the gradient is off by that ratio, and it changes from group to "
            "group with the lengths. Counting labels before they are shifted is the usual cause: a "
            "causal model predicts one token less than each sequence has."
        ),
        remedy="count what the loss is over: labels[:, 1:] where they are shifted by one",
    ),
    Page(
        code="MF301",
        severity=_W,
        title="a layer makes one example depend on the others in its microbatch",
        meaning=(
            "Batch normalisation in training normalises with the mean and variance of the "
            "microbatch. A microbatch of m therefore computes another function than the physical "
            "batch of B: no weighting can make the gradients equal, and the smaller m is, the "
            "noisier the statistics. Running statistics are updated once per microbatch, A times "
            "per optimizer step, so that their momentum acts A times as fast. Layers are found by "
            "what they do: the output of the same example with and without its neighbours."
        ),
        remedy=(
            "use GroupNorm or LayerNorm, freeze the statistics (eval() on these layers), keep m "
            "large enough to normalise over (SyncBatchNorm joins replicas, not microbatches), or "
            "accept it with --accept MF301"
        ),
    ),
    Page(
        code="MF302",
        severity=_R,
        title="buffers change in forward, once per microbatch",
        meaning=(
            "A layer updates its own buffers in forward: power iterations, moving averages, "
            "counters. They advance A times per optimizer step, whatever the gradient does; a "
            "momentum of 0.9 over 4 microbatches is one of 0.6561 per step."
        ),
        remedy=(
            "adapt the momentum (beta ** (1 / A)), or update the buffers once per group after the "
            "optimizer step"
        ),
    ),
    Page(
        code="MF303",
        severity=_E,
        title="the loss itself compares examples of one microbatch",
        meaning=(
            "No layer mixes examples, and yet the gradient of the batch is no weighted sum of "
            "those of its examples: contrastive losses with negatives from the batch, pairwise "
            "and ranking losses, and statistics over the batch. A microbatch of m has m-1 "
            "negatives, the physical batch B-1: accumulation trains another loss."
        ),
        remedy=(
            "cache the representations and back-propagate in two passes (GradCache), gather "
            "them over the replicas, or take the microbatch itself as what the loss is defined on"
        ),
    ),
    Page(
        code="MF304",
        severity=_E,
        title="forward depends on how often it was called",
        meaning=(
            "The same examples with the same parameters, buffers and random state gave another "
            "loss at the second call: something outside the module's buffers counts calls, such "
            "as an annealed weight. With A microbatches it advances A times per optimizer step."
        ),
        remedy="advance it once per optimizer step, from outside forward",
    ),
    Page(
        code="MF401",
        severity=_R,
        title="random draws: equal in distribution, not value by value",
        meaning=(
            "Dropout and other draws in forward come from one generator, and a group draws in "
            "another order and shape than the physical batch. The gradients are equal in "
            "distribution. So that arithmetic can be told from chance, the comparison is made "
            "with every draw replaced by its mean: dropout keeps everything."
        ),
        remedy="nothing is to be done; set the probability to 0 to see the values themselves agree",
    ),
    Page(
        code="MF402",
        severity=_W,
        title="random draws from outside torch",
        meaning=(
            "Forward or loss draws from Python's or NumPy's generator. memfit can hold torch's "
            "draws still, not these, and a difference may then be chance. They are also not "
            "seeded by torch.manual_seed, nor saved in its checkpoints."
        ),
        remedy="draw with torch, or draw before forward and pass the values in the batch",
    ),
    Page(
        code="MF501",
        severity=_E,
        title="gradients are cleared inside the group: accumulation without effect",
        meaning=(
            "zero_grad runs before every backward while the optimizer steps once per group: only "
            "the last microbatch is trained on, and the work of the others is thrown away."
        ),
        remedy="clear gradients once per group, right after the optimizer step",
        example=(
            "for i, microbatch in enumerate(loader):\n    (loss(microbatch) / A).backward()\n"
            "    if (i + 1) % A == 0:\n        optimizer.step()\n        optimizer.zero_grad()"
        ),
    ),
    Page(
        code="MF502",
        severity=_E,
        title="gradients are not cleared between groups",
        meaning=(
            "The first backward of a group found the gradients of the group before it still "
            "there, so that every step trains on the sum of all earlier groups."
        ),
        remedy="call optimizer.zero_grad() once after each optimizer step",
    ),
    Page(
        code="MF503",
        severity=_E,
        title="the optimizer steps after every microbatch",
        meaning=(
            "The loss is divided for a group of A microbatches, or the group was asked for A of "
            "them, and the optimizer steps after each one: A small steps instead of one, each "
            "with a fraction of the gradient, and the optimizer's state advances A times."
        ),
        remedy="step once after the last microbatch of the group",
    ),
    Page(
        code="MF504",
        severity=_E,
        title="gradients are clipped inside the group",
        meaning=(
            "Clipping is not linear: clipping a partial sum after each microbatch, or each "
            "gradient as it accumulates, gives another direction than clipping the gradient of "
            "the logical batch once."
        ),
        remedy="clip once, after the last backward of the group and before the optimizer step",
    ),
    Page(
        code="MF505",
        severity=_E,
        title="scaled gradients are clipped: unscale_ is missing or comes too late",
        meaning=(
            "With a gradient scaler, gradients carry its scale (65536 at first) until unscale_ or "
            "step takes it off. Clipped before that, nearly every gradient is cut to the norm "
            "divided by the scale."
        ),
        remedy="call scaler.unscale_(optimizer) once, after the last backward and before clipping",
    ),
    Page(
        code="MF506",
        severity=_E,
        title="gradients are unscaled more than once in a group",
        meaning=(
            "unscale_ divides the gradients that are there by the scale. After that the next "
            "microbatch adds scaled ones, so that the sum mixes two units; called twice for one "
            "optimizer without update() between, torch raises an error."
        ),
        remedy="call scaler.unscale_(optimizer) once per group, after its last backward",
    ),
    Page(
        code="MF507",
        severity=_E,
        title="the gradient scale changes inside a group",
        meaning=(
            "scaler.update() between two microbatches of one group may change the scale, and "
            "the group's gradient is then a sum of gradients in different units."
        ),
        remedy="call scaler.update() once per group, right after scaler.step()",
    ),
    Page(
        code="MF508",
        severity=_E,
        title="the learning-rate schedule steps per microbatch",
        meaning=(
            "A schedule is written in optimizer steps. Stepped for every microbatch it runs A "
            "times as fast: warm-up and decay end at 1/A of the training."
        ),
        remedy="call scheduler.step() after optimizer.step(), once per group",
    ),
    Page(
        code="MF509",
        severity=_W,
        title="graphs are kept alive between microbatches: memory grows",
        meaning=(
            "A loss that still has its graph is added up or stored, or backward is called with "
            "retain_graph=True. Every microbatch then leaves its graph behind, with all its "
            "activations where the graph is retained, until the group or the epoch ends. The "
            "gradient is right; the largest microbatch that fits is smaller than it could be."
        ),
        remedy="keep loss.detach() or loss.item(), and do not retain graphs",
    ),
    Page(
        code="MF510",
        severity=_W,
        title="replicas reduce gradients in every microbatch",
        meaning=(
            "DistributedDataParallel decides in forward whether backward reduces. All but the "
            "last microbatch should run forward and backward inside no_sync(); with only backward "
            "inside, or none, gradients are reduced A times per step. The result is the same and "
            "the communication A times as much."
        ),
        remedy="put forward and backward of all but the last microbatch inside model.no_sync()",
    ),
    Page(
        code="MF511",
        severity=_E,
        title="microbatches at the end never reach the optimizer",
        meaning=(
            "The loop ended after backward passes that no optimizer step followed: these examples "
            "were computed and not trained on, or their gradients leak into the next epoch."
        ),
        remedy="step once more after the last microbatch, weighted by what the last group has",
    ),
    Page(
        code="MF512",
        severity=_E,
        title="the learning-rate schedule steps before the optimizer",
        meaning=(
            "scheduler.step() before the first optimizer.step() skips the first value of the "
            "schedule, and every step uses the value that was meant for the next one."
        ),
        remedy="call optimizer.step() first, then scheduler.step()",
    ),
    Page(
        code="MF601",
        severity=_W,
        title="the optimizer leaves out parameters that have gradients",
        meaning=(
            "Parameters that need a gradient and got one are in no parameter group: their "
            "gradient costs memory, counts in the clipped norm, and is never cleared by "
            "optimizer.zero_grad()."
        ),
        remedy="give them to the optimizer, or freeze them with requires_grad_(False)",
    ),
    Page(
        code="MF602",
        severity=_W,
        title="optimizer steps were skipped by the gradient scaler",
        meaning=(
            "A scaler skips the step when a gradient is not finite, and halves its scale. Steps "
            "attempted, applied and skipped are counted apart; a schedule that advances on "
            "skipped steps runs ahead of the training."
        ),
        remedy="advance the schedule only when the scale did not fall; look at skips that last",
    ),
    Page(
        code="MF603",
        severity=_E,
        title="the optimizer's state advances more than once per group",
        meaning=(
            "One call of step() advanced the optimizer's own counter by more than one: moments, "
            "bias corrections and whatever else it counts run ahead of the steps."
        ),
        remedy="let the optimizer's step() make one step, and call it once per group",
    ),
    Page(
        code="MF604",
        severity=_W,
        title="the groups have another logical batch than was asked for",
        meaning=(
            "The examples of one group, as the first dimension of the model's input has them, are "
            "not those that were asked for. Where B changes, optimizer steps per epoch change "
            "with it, and so does everything that counts in steps: schedules, warm-up, logging, "
            "checkpoints, evaluation, weight decay per epoch and moving averages. For the "
            "learning rate there are two heuristics, and memfit applies neither: linear scaling, "
            "lr * B'/B, with warm-up, for SGD (Goyal et al. 2017, arXiv:1706.02677); and "
            "square-root scaling, lr * sqrt(B'/B), for adaptive optimizers (Krizhevsky 2014, "
            "arXiv:1404.5997; Malladi et al. 2022, arXiv:2205.10287, which also scales the "
            "betas). Both fail beyond a critical batch size (McCandlish et al. 2018, "
            "arXiv:1812.06162)."
        ),
        remedy="keep B where you can; where it changes, say so and tune the learning rate again",
    ),
    Page(
        code="MF701",
        severity=_E,
        title="replicas train on the same examples",
        meaning=(
            "Two replicas were given the same examples in the same group. The logical batch then "
            "has fewer distinct examples than m*A*D: its gradient is that of a smaller batch at D "
            "times the cost."
        ),
        remedy=(
            "use a DistributedSampler (and set_epoch), or seed each replica's data by its rank"
        ),
    ),
    Page(
        code="MF702",
        severity=_E,
        title="replicas with unequal elements count alike",
        meaning=(
            "DistributedDataParallel averages gradients over replicas, so each replica's mean "
            "over its own tokens counts the same. The mean over all tokens needs every "
            "contribution multiplied by D * n_i / N, where N counts the group's elements over all "
            "replicas."
        ),
        remedy="all-reduce the counts before the first backward and multiply by D * n_i / N",
        example=(
            "n = torch.tensor(sum(counts)); dist.all_reduce(n)\n"
            "loss = mean_loss(model, microbatch) * dist.get_world_size() * count / n"
        ),
    ),
    Page(
        code="MF703",
        severity=_E,
        title="the gradient over replicas is off by a factor",
        meaning=(
            "The loss is divided by the elements of all replicas, and the wrapper averages over "
            "replicas as well: the gradient is 1/D of the logical batch's. Or it is summed where "
            "the mean was meant, and D times too large."
        ),
        remedy="multiply by D what an averaging wrapper reduces, when N counts all replicas",
    ),
    Page(
        code="MF704",
        severity=_E,
        title="replicas end with different parameters",
        meaning=(
            "After the optimizer step the replicas no longer hold the same parameters: a gradient "
            "was not reduced (the last microbatch ran inside no_sync, or around the wrapper), or "
            "they were built from different seeds."
        ),
        remedy="run the last forward and backward of a group outside no_sync, through the wrapper",
    ),
)

CATALOGUE = {page.code: page for page in _PAGES}
"""Every code, in order."""
