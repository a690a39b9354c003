"""One whole iteration beside TRL's trainer, in one process and in turn: a TRL iteration, then one of each of ours.

    pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 && pip install -e .     # trl==1.12.0 for ppo
    python experiments/bench/iteration.py grpo --size 1M --ours pass,engine,auto
    python experiments/bench/iteration.py grpo --size 1M --epochs 2 --beta 0.04
    python experiments/bench/iteration.py grpo --size 1M --prompt 256 --n 8 --ours pass,pass+apart
    python experiments/bench/iteration.py ppo --size 13M
    python experiments/bench/iteration.py grpo --size 0.5B --device cuda --tokens 256 --rounds 5

64 responses of exactly 64 tokens to prompts of 6 (`--prompt`), mini-batches of 16 rows, AdamW with a rate of 1e-4,
gradients clipped at 1, float32, temperature 1, 2 threads; GRPO with 8 responses to each prompt (`--n`), PPO with a
policy, a reference, a critic and a reward model of one shape. On a GPU both compute in bfloat16 on float32 weights, TRL
by autocast, ours by the kernels that `fppo train` takes there. The first iteration of each is not counted. A ratio is
our time over that of TRL's iteration right before; the lines show medians. `--ours` names where the old log-probs come
from (`algorithm.old_log_probs`); `+compiled` behind a name compiles the layers, `+cpp` takes the kernels in C++, in the
engine for attention alone, `+onednn` takes oneDNN's products besides, in the engine too, `+launched` records no passes
on a GPU, `+apart` computes a prompt for each of its responses anew, `,` is between variants.

"products alone" (on a CPU, where no prompt is shared) is the time of the matrix products of an iteration's linear
layers, on tensors of their shapes, each by the faster of torch and oneDNN: the least that such an iteration can take.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fppo import advantages, losses, metrics, models, rewards, tree
from fppo.data import prompt_set
from fppo.key import Key
from fppo.models.model import Model
from fppo.pipeline import pieces, ppo_step
from fppo.quickstart import character_tokenizer
from fppo.rewards.models import model_reward
from fppo.rollout import Sampling
from fppo.runtime.mesh import LOCAL
from fppo.steps import Loop, MicroBatching, PolicyTerms, adamw
from fppo.steps.recorded import graphs
from fppo_kernels.linear.onednn import onednn
from fppo_kernels.table import Kernels

# width, inner width, layers, heads, tokens (0: the tokenizer's)
SIZES = {"1M": (128, 512, 4, 4, 0), "13M": (384, 1536, 6, 6, 0), "0.5B": (896, 4864, 24, 14, 151936)}
SUM = len("12+34=")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
ROWS, MINI = 64, 16
LAYERS = ("rms_norm", "add_rms_norm", "rotary", "glu")
IN_CPP = (*LAYERS, "attention", "decode_attention", "log_probs")
KL_COEF = 0.05  # TRL's default in PPO, in the rewards


@attrs.frozen
class Times:
    """Seconds of an iteration and of its generation."""

    whole: float
    generation: float


@attrs.frozen(kw_only=True)
class Task:
    """What both sides work on."""

    kind: str  # "grpo" or "ppo"
    directory: str  # of a random model and its tokenizer
    tokenizer: PreTrainedTokenizerFast
    prompts: list[str]
    answers: list[str]
    epochs: int
    beta: float
    device: torch.device
    tokens: int  # of a response
    n: int  # responses to a prompt


def make(options: argparse.Namespace, directory: str) -> Task:
    """A random model in a directory, and sums as prompts, after letters that make these as long as they are to be."""
    width, inner, layers, heads, vocabulary = SIZES[options.size]
    tokenizer = character_tokenizer("0123456789+=-*/()., " + LETTERS)
    config = Qwen2Config(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(directory)
    draw = random.Random(0)
    sums = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(4096)]
    before = ["".join(draw.choices(LETTERS, k=options.prompt - SUM)) for _ in sums]
    return Task(
        kind=options.kind,
        directory=directory,
        tokenizer=tokenizer,
        prompts=[f"{letters}{a}+{b}=" for letters, (a, b) in zip(before, sums, strict=True)],
        answers=[str(a + b) for a, b in sums],
        epochs=options.epochs,
        beta=options.beta,
        device=torch.device(options.device),
        tokens=options.tokens,
        n=options.n,
    )


def loaded(task: Task) -> tuple[Model, dict[str, Tensor]]:
    """The model, in bfloat16 on a GPU, and its float32 parameters there."""
    model, params = models.load(task.directory)
    on_gpu = task.device.type == "cuda"
    return attrs.evolve(model, compute_dtype=torch.bfloat16 if on_gpu else None), tree.map(
        lambda x: x.to(task.device), params
    )


def kernels_of(task: Task, choice: str) -> Kernels:
    """The kernels of a choice; on a GPU those that `fppo train` takes there."""
    if choice in ("cpp", "onednn"):
        linear = "onednn" if choice == "onednn" else "torch"
        return Kernels.named(**dict.fromkeys(IN_CPP, "cpp"), linear=linear)
    if task.device.type != "cuda":
        return Kernels.named()
    inside = "eager" if choice == "compiled" else "triton"
    return Kernels.named(**dict.fromkeys(LAYERS, inside), attention="varlen", log_probs="triton")


def reward_of(text: str, answer: str) -> float:
    """1 for the answer at the start, and up to 0.1 for digits."""
    return float(text.startswith(answer)) + 0.1 * sum(x.isdigit() for x in text) / max(1, len(text))


@rewards.inline_reward
@rewards.batch_reward
def our_reward(samples: list[rewards.Sample]) -> list[float]:
    return [reward_of(sample.response, sample.ground_truth) for sample in samples]


def our_iteration(
    task: Task, variant: str, change: Callable[[Kernels], Kernels] = lambda kernels: kernels
) -> Callable[[], Times]:
    """One iteration of ours after the other, each from the state that the one before left, with changed kernels."""
    source, _, choice = variant.partition("+")
    model, params = loaded(task)
    model, kernels = attrs.evolve(model, compile_layers=choice == "compiled"), change(kernels_of(task, choice))
    ppo = task.kind == "ppo"
    micro = MicroBatching(size=MINI)
    kept = pieces(
        (model, params),
        task.tokenizer,
        prompt_set(task.prompts, task.tokenizer, ground_truths=task.answers),
        reward=_our_reward_model(task) if ppo else our_reward,
        sampling=Sampling(n=1 if ppo else task.n, max_tokens=task.tokens),
        batch_size=ROWS,
        loop=Loop(mini_batch_size=MINI, micro_batching=micro, epochs=task.epochs),
        optimizer=adamw(lambda step: 1e-4, weight_decay=0.0, max_grad_norm=1.0),
        advantage=advantages.gae if ppo else advantages.grpo,
    )
    program: Any = kept.program
    record = graphs(model, task.device) if task.device.type == "cuda" and choice == "" else None
    share = False if choice == "apart" else "auto"
    policy, critic = (
        each and attrs.evolve(each, kernels=kernels, share_prompts=share) for each in (kept.policy, kept.critic)
    )
    decoding = {name: getattr(kernels, name) for name in (*LAYERS, "decode_attention", "linear")}  # others stay
    engine = attrs.evolve(kept.engine, kernels=attrs.evolve(kept.engine.kernels, **decoding))
    passes = program.annotate.passes
    passes = attrs.evolve(
        passes,
        policy=attrs.evolve(passes.policy, forward=policy, record=record),
        reference=attrs.evolve(passes.reference, forward=policy, record=record),
        values=critic and attrs.evolve(passes.values, forward=critic, record=record),
    )
    update, terms = program.update_actor, PolicyTerms(kl_coef=0.0 if ppo else task.beta)
    program = attrs.evolve(
        program,
        rollout=attrs.evolve(program.rollout, engine=engine, sampling=attrs.evolve(kept.sampling, stop_token_ids=())),
        annotate=attrs.evolve(program.annotate, old_log_probs=source, passes=passes),
        update_actor=attrs.evolve(update, old_log_probs=source, terms=terms, forward=policy, record=record),
        update_critic=critic and attrs.evolve(program.update_critic, forward=critic, record=record),
        estimate=attrs.evolve(program.estimate, kl_in_reward=ppo),
    )
    run = kept.run
    if ppo or task.beta:
        run = tree.replace(run, ref=tree.copy(params), kl=losses.KLState(coef=KL_COEF if ppo else 0.0))

    def iteration() -> Times:
        nonlocal run
        start = time.perf_counter()
        run, rows, report = ppo_step(run, program=program, draw=kept.draw, donate=True)
        wait(task.device)
        seconds = time.perf_counter() - start
        if int(rows.response_mask.sum()) != ROWS * task.tokens:
            raise ValueError(f"{int(rows.response_mask.sum())} tokens of responses, expected {ROWS * task.tokens}")
        return Times(seconds, float(metrics.report(report)["timing_s/gen"]))

    return iteration


def _our_reward_model(task: Task) -> rewards.RewardFn:
    model, params = models.as_critic(*loaded(task), Key(1))
    return model_reward(
        params, model=model, kernels=kernels_of(task, ""), mesh=LOCAL, micro_batching=MicroBatching(size=MINI)
    )


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Turns:
    """Times TRL's iterations, and runs one of each of ours after every one of them."""

    def __init__(self, ours: dict[str, Callable[[], Times]], device: torch.device) -> None:
        self.ours, self.device = ours, device
        self.rounds: list[tuple[Times, dict[str, Times]]] = []
        self.generation = 0.0
        self.start = time.perf_counter()

    def turn(self) -> None:
        """TRL's iteration has ended."""
        wait(self.device)
        theirs = Times(time.perf_counter() - self.start, self.generation)
        self.rounds.append((theirs, {name: iteration() for name, iteration in self.ours.items()}))
        self.begin()

    def begin(self) -> None:
        self.generation, self.start = 0.0, time.perf_counter()

    def timed_generation(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate`, with its seconds added up."""

        def generate_and_time(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = generate(*args, **kwargs)
            wait(self.device)
            self.generation += time.perf_counter() - start
            return result

        return generate_and_time


def grpo(task: Task, turns: Turns, rounds: int) -> None:
    """TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    updates = ROWS // MINI * task.epochs

    class AfterIteration(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % updates == 0:
                turns.turn()

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=MINI,
        steps_per_generation=ROWS // MINI,
        num_iterations=task.epochs,
        num_generations=task.n,
        max_completion_length=task.tokens,
        temperature=1.0,
        beta=task.beta,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_steps=rounds * updates,
        logging_steps=1000,
        report_to="none",
        save_strategy="no",
        use_cpu=task.device.type == "cpu",
        bf16=task.device.type == "cuda",
        gradient_checkpointing=False,
        max_grad_norm=1.0,
        generation_kwargs={"min_new_tokens": task.tokens},
        disable_tqdm=True,
    )

    def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [reward_of(text, right) for text, right in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.directory, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": task.prompts, "answer": task.answers}),
        processing_class=task.tokenizer,
        callbacks=[AfterIteration()],
    )
    trainer._generate = turns.timed_generation(trainer._generate)
    trainer.train()


def ppo(task: Task, turns: Turns, rounds: int) -> None:
    """TRL's PPOTrainer, of 1.12 and before."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # pyright: ignore[reportMissingImports]

    config = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        num_mini_batches=ROWS // MINI,
        num_ppo_epochs=task.epochs,
        local_rollout_forward_batch_size=ROWS,
        response_length=task.tokens,
        temperature=1.0,
        total_episodes=ROWS * (rounds + 1),  # the last begins another, which is not counted
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        kl_coef=KL_COEF,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        use_cpu=task.device.type == "cpu",
        bf16=task.device.type == "cuda",
        gradient_checkpointing=False,
        logging_steps=1000,
        disable_tqdm=True,
        sft_model_path=task.directory,
        reward_model_path=task.directory,
    )

    def classifier() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(task.directory, num_labels=1, dtype=torch.float32)

    trainer = PPOTrainer(
        args=config,
        processing_class=task.tokenizer,
        model=AutoModelForCausalLM.from_pretrained(task.directory, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(task.directory, dtype=torch.float32),
        reward_model=classifier(),
        value_model=classifier(),
        train_dataset=Dataset.from_dict({"input_ids": [task.tokenizer(text)["input_ids"] for text in task.prompts]}),
    )
    generate, begun = turns.timed_generation(ppo_trainer.batch_generation), 0

    def generate_and_turn(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        turns.turn() if begun else turns.begin()  # the iteration before ends where this one begins
        begun += 1
        return generate(*args, **kwargs)

    ppo_trainer.batch_generation = generate_and_turn
    trainer.train()


def products(task: Task, source: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the products of an iteration: decoding, passes for log-probs and values, and updates; the old
    log-probs are from a pass, or none is."""
    model, params = loaded(task)
    seconds = partial(_product, clock=clock)
    weights = [x for name, x in params.items() if x.dim() == 2 and model.layer_of(name) is not None]
    rows = MINI * (task.tokens + len(task.prompts[0]))  # a token for each character
    forward = sum(seconds(rows, weight) for weight in weights)
    backward = sum(
        seconds(rows, weight.T) + seconds(len(weight), torch.randn(weight.shape[1], rows)) for weight in weights
    )
    decode = task.tokens * sum(seconds(ROWS, weight) for weight in weights)
    ppo = task.kind == "ppo"
    passes = (source == "pass") + 3 * ppo + (task.beta > 0)  # PPO: reference, values, rewards
    updates = task.epochs * (1 + ppo)
    return decode + ROWS // MINI * (passes * forward + updates * (forward + backward))


def _product(rows: int, weight: Tensor, clock: Callable[[], float]) -> float:
    """Seconds of x @ weight.T for x of so many rows, by the faster kernel."""
    x, seconds = torch.randn(rows, weight.shape[1]), list[float]()
    for linear in (torch.nn.functional.linear, onednn):
        times = list[float]()
        for _ in range(7):
            start = clock()
            linear(x, weight)
            times.append(clock() - start)
        seconds.append(statistics.median(times))
    return min(seconds)


def show(turns: Turns, least: dict[str, float]) -> None:
    """Medians, and the medians of the ratios, of all rounds but the first; and the time of the products alone."""
    rounds = turns.rounds[1:]
    theirs = statistics.median(their.whole for their, _ in rounds)
    generating = statistics.median(their.generation for their, _ in rounds)
    print(f"{'':20s}{'iteration':>12}{'ratio':>8}{'least':>8}{'most':>8}{'generation':>12}{'ratio':>8}")
    print(f"{'TRL':20s}{theirs:>10.3f} s{'':24}{generating:>10.3f} s")
    for name in turns.ours:
        whole = [own[name].whole / their.whole for their, own in rounds]
        decode = [own[name].generation / their.generation for their, own in rounds]
        seconds = statistics.median(own[name].whole for _, own in rounds)
        decoding = statistics.median(own[name].generation for _, own in rounds)
        print(
            f"{name:20s}{seconds:>10.3f} s{statistics.median(whole):>8.2f}{min(whole):>8.2f}{max(whole):>8.2f}"
            f"{decoding:>10.3f} s{statistics.median(decode):>8.2f}"
        )
    for name, seconds in least.items():
        print(f"{name:20s}{seconds:>10.3f} s{seconds / theirs:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["grpo", "ppo"])
    parser.add_argument("--size", choices=sorted(SIZES), default="1M")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--beta", type=float, default=0.0, help="factor of the KL term (GRPO)")
    parser.add_argument("--ours", default="pass")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--prompt", type=int, default=SUM, help=f"tokens of a prompt, at least {SUM}")
    parser.add_argument("--n", type=int, default=8, help=f"responses to a prompt (GRPO), a divisor of {ROWS}")
    options = parser.parse_args()
    if options.prompt < SUM or ROWS % options.n:
        parser.error(f"--prompt {options.prompt} --n {options.n}: give {SUM} tokens or more, and a divisor of {ROWS}")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        task = make(options, directory)
        turns = Turns({name: our_iteration(task, name) for name in options.ours.split(",")}, task.device)
        {"grpo": grpo, "ppo": ppo}[options.kind](task, turns, options.rounds)
        shared = options.kind == "grpo" and options.prompt > SUM
        sources = {} if shared or options.device != "cpu" else dict.fromkeys(x.partition("+")[0] for x in turns.ours)
        with torch.no_grad():
            least = {f"products alone, {x}": products(task, x) for x in sources}
    lengths = f"prompts of {options.prompt}, {options.n} responses of {options.tokens}"
    print(
        f"{options.kind} {options.size}, {lengths}, epochs {options.epochs}, beta {options.beta}, "
        f"torch {torch.__version__}"
    )
    show(turns, least)


if __name__ == "__main__":
    main()
