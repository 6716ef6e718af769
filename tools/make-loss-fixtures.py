#!/usr/bin/env python3
"""Makes tests/fixtures/losses/{trl,verl,optimizer}.json: what TRL, verl and PyTorch compute.

Nothing is retyped. TRL's real GRPOTrainer runs (its `_generate_and_score_completions` and `compute_loss`); only
its generation and its per-token log-probs are replaced by given numbers. verl's core_algos.py and
rollout_corr_helper.py are imported from its wheel with empty stand-ins for the packages that they import but
that these functions do not use. PyTorch's AdamW and clip_grad_norm_ and transformers' get_scheduler run as they
are. Everything runs in f64 on inputs that f32 holds exactly.

    pip install torch==2.15.0 transformers==5.24.0 trl==1.16.0
    pip download --no-deps verl==0.9.1 && unzip verl-0.9.1-py3-none-any.whl -d verl
    python3 tools/make-loss-fixtures.py trl verl optimizer --verl verl
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import pathlib
import sys
import tempfile
import types
import warnings

import numpy as np
import torch

PINNED = {"torch": "2.15.0", "transformers": "5.24.0", "trl": "1.16.0"}
VERL = "0.9.1"
OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "losses"
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def check_versions():
    for package, wanted in PINNED.items():
        got = importlib.metadata.version(package).split("+")[0]
        if got != wanted:
            sys.exit(f"{package} is {got}; the fixtures are defined by {wanted}")


def single(x):
    """Rounded to what f32 holds."""
    return np.asarray(x, dtype=np.float32).astype(np.float64)


def numbers(tensor):
    """Floats with 15 significant digits: f64 accuracy beyond any tolerance of the tests, small files."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().tolist()
    if isinstance(tensor, list):
        return [numbers(x) for x in tensor]
    return float(f"{tensor:.15g}")


def rollouts(seed, lengths, untrained=()):
    """Log-probs around each other, masks with tool tokens inside; `untrained` rows have no trained token."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, n in enumerate(lengths):
        logp = single(rng.uniform(-3.0, -0.1, n))
        old = single(logp + rng.uniform(-0.5, 0.5, n))
        mask = [0 if i in untrained else int(t == 0 or rng.random() < 0.75) for t in range(n)]
        rows.append({
            "logp": logp.tolist(),
            "logp_old": old.tolist(),
            "logp_ref": single(logp + rng.uniform(-1.0, 1.0, n)).tolist(),
            "logp_sampler": single(old + rng.uniform(-0.4, 0.4, n)).tolist(),
            "entropy": single(rng.uniform(0.0, 2.0, n)).tolist(),
            "mask": mask,
        })
    return rows


def padded(rows, key, fill=0.0):
    width = max(len(r[key]) for r in rows)
    return torch.tensor([list(r[key]) + [fill] * (width - len(r[key])) for r in rows])


def write(name, document):
    OUT.mkdir(parents=True, exist_ok=True)
    cases = document.pop("cases")
    head = json.dumps(document)
    body = ",\n".join(json.dumps(c) for c in cases)
    path = OUT / f"{name}.json"
    path.write_text(f'{head[:-1]}, "cases": [\n{body}\n]}}\n')
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes")


# --- TRL ---------------------------------------------------------------------------------------------------


def tiny_model(folder):
    """A model and tokenizer that TRL accepts; neither decides any number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab = {f"t{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t62", eos_token="t63", unk_token="t0"
    ).save_pretrained(folder)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, pad_token_id=62, eos_token_id=63,
    )).save_pretrained(folder)


def make_trl():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import split_tensor_dict

    rows = rollouts(1, [9, 5, 7, 1, 6, 8, 4, 9], untrained=(5,))
    rewards = [1.0, 0.0, 0.25, 0.7, 0.3, 0.8, None, 0.1]
    max_completion_length = 12
    accumulation = 2

    class Given(GRPOTrainer):
        """The real trainer over given numbers. The prompt of row i is the token i."""

        def _generate(self, prompts):
            ids = [[1] * len(r["logp"]) for r in self.rows]
            return (
                [[i] for i in range(len(ids))], ids, [r["mask"] for r in self.rows], ["" for _ in ids],
                [r["logp_sampler"] for r in self.rows], {}, None, None,
            )

        def _get_per_token_logps_and_entropies(self, model, input_ids, *_, compute_entropy=False, **__):
            which = input_ids[:, 0].tolist()
            if compute_entropy:  # the policy, inside compute_loss
                self.leaves.append((which, self.policy[which], self.entropy[which]))
                return self.policy[which], self.entropy[which], None
            key = "logp_old" if model is self.model else "logp_ref"
            return padded(self.rows, key)[which], None, None

        def run(self):
            """(advantages, loss, dloss/dlogp, dloss/dentropy) of one optimiser update."""
            self.policy = padded(self.rows, "logp").requires_grad_()
            self.entropy = padded(self.rows, "entropy").requires_grad_()
            self.leaves = []
            batch = self._generate_and_score_completions([{"prompt": "t1"} for _ in self.rows])
            self.current_gradient_accumulation_steps = accumulation
            loss = 0.0
            for micro in split_tensor_dict(batch, accumulation):
                part = self.compute_loss(self.model, micro)
                part.backward()
                loss += part.item()
            gradient = self.policy.grad
            of_entropy = self.entropy.grad
            cut = lambda g: [numbers(x[: len(r["logp"])]) for x, r in zip(g.tolist(), self.rows)]
            return {
                "advantages": numbers(batch["advantages"]),
                "loss": numbers(loss),
                "dlogp": cut(gradient),
                "dentropy": None if of_entropy is None else cut(of_entropy),
            }

    Given.rows, Given.rewards = rows, rewards

    def reward(prompts, completions, **_):
        return list(Given.rewards)

    cases = []
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(folder)

        def trainer(**options):
            args = GRPOConfig(
                output_dir=f"{folder}/out", report_to="none", use_cpu=True, bf16=False, num_generations=4,
                per_device_train_batch_size=len(rows) // accumulation, gradient_accumulation_steps=accumulation,
                num_iterations=2, max_completion_length=max_completion_length, use_bias_correction_kl=False,
                gradient_checkpointing=False, **options,
            )
            data = Dataset.from_dict({"prompt": ["t1"] * 8})
            made = Given(model=folder, reward_funcs=reward, args=args, train_dataset=data)
            made.model.train()
            return made

        families = {
            "grpo": ("grpo", "token"), "bnpo": ("bnpo", "token"), "dr_grpo": ("dr_grpo", "token"),
            "dapo": ("dapo", "token"), "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token"),
        }
        ratio = [
            {"epsilon": 0.2, "epsilon_high": 0.28}, {"epsilon": 0.1, "epsilon_high": 0.1},
            {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.15},
            {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.4},
        ]
        clips = {
            "gspo": [
                {"epsilon": 3e-4, "epsilon_high": 4e-4}, {"epsilon": 0.05, "epsilon_high": 0.08},
                {"epsilon": 0.05, "epsilon_high": 0.08, "delta": 1.04},
            ],
            "cispo": [{"epsilon": 0.2, "epsilon_high": 5.0}, {"epsilon": 0.2, "epsilon_high": 1.1}],
        }
        modes = {
            "token_truncate": ("tis", "token"), "token_mask": ("mis", "token"),
            "sequence_truncate": ("tis", "sequence"), "sequence_mask": ("mis", "sequence"),
        }
        corrections = [None] + [
            (mode, high, low) for mode in modes for high, low in [(1.3, None), (1.25, 0.8)]
        ]
        for name, (loss_type, level) in families.items():
            for clip, beta in itertools.product(clips.get(name, ratio), [0.0, 0.3]):
                made = trainer(loss_type=loss_type, importance_sampling_level=level, beta=beta, **clip)
                for correction in corrections:
                    made.use_vllm = correction is not None
                    made.vllm_importance_sampling_correction = correction is not None
                    options = {
                        "loss": name, "beta": beta, "epsilon_low": clip["epsilon"],
                        "epsilon_high": clip["epsilon_high"], "delta": clip.get("delta"),
                    }
                    if correction:
                        mode, high, low = correction
                        made.vllm_importance_sampling_mode = mode
                        made.vllm_importance_sampling_clip_max = high
                        made.vllm_importance_sampling_clip_min = low
                        kind, correction_level = modes[mode]
                        options["correction"] = {"kind": kind, "level": correction_level, "max": high, "min": low}
                    result = made.run()
                    result.pop("dentropy")
                    cases.append({"options": options, **result})

        # Entropy bonus: TRL's is a token mean of each micro-batch for every family.
        bonus = trainer(loss_type="bnpo", beta=0.0, epsilon=0.2, epsilon_high=0.28, entropy_coef=0.05).run()
        entropy = {"options": {"loss": "bnpo", "beta": 0.0, "entropy_coef": 0.05}, **bonus}

        advantages = []
        sets = [
            [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0], [0.7] * 4 + [0.1, 0.9, 0.4, 0.4],
            [None, 0.5, 0.2, None, -3.0, 4.5, 2.25, 100.0], [0.3, 0.1, 0.2, 0.3, 0.5, None, 0.25, 0.75],
        ]
        for scale in ["group", "batch", "none"]:
            made = trainer(loss_type="dapo", beta=0.0, scale_rewards=scale)
            for given in sets:
                Given.rewards = given
                kept = [None if x is None else float(np.float32(x)) for x in given]
                advantages.append({"scale": scale, "rewards": kept, "advantages": made.run()["advantages"]})

    kept = [None if x is None else float(np.float32(x)) for x in rewards]
    write("trl", {
        "made_by": {"trl": PINNED["trl"], "torch": PINNED["torch"], "transformers": PINNED["transformers"]},
        "max_completion_length": max_completion_length, "micro_batches": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "groups": [0, 0, 0, 0, 1, 1, 1, 1], "rewards": kept, "rollouts": rows, "entropy": entropy,
        "advantages": advantages, "cases": cases,
    })


# --- verl --------------------------------------------------------------------------------------------------


def import_verl(root):
    """core_algos and rollout_corr_helper from the wheel's files; stand-ins for what they do not use here."""
    root = pathlib.Path(root) / "verl"
    version = (root / "version" / "version").read_text().strip()
    if version != VERL:
        sys.exit(f"verl is {version}; the fixtures are defined by {VERL}")

    def stand_in(name, **attributes):
        module = types.ModuleType(name)
        module.__path__ = []
        for key, value in attributes.items():
            setattr(module, key, value)
        sys.modules[name] = module
        return module

    def real(name, path):
        spec = importlib.util.spec_from_file_location(name, root / path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    class ActorConfig(dict):
        __getattr__ = dict.__getitem__

    class Unused:
        pass

    for package in ["verl", "verl.trainer", "verl.trainer.ppo", "verl.utils", "verl.workers"]:
        stand_in(package)
    stand_in("omegaconf", DictConfig=Unused)
    stand_in("tensordict", TensorDict=Unused)
    stand_in("verl.protocol", DataProto=Unused)
    stand_in("verl.trainer.config", AlgoConfig=Unused)
    stand_in("verl.trainer.config.algorithm", RolloutCorrectionConfig=Unused)
    stand_in("verl.workers.config", ActorConfig=ActorConfig)
    stand_in("verl.workers.config.actor", PolicyLossConfig=Unused)
    stand_in("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    real("verl.utils.import_utils", "utils/import_utils.py")
    groupwise = real("verl.utils.groupwise", "utils/groupwise.py")
    sys.modules["verl.utils"].as_torch_index = groupwise.as_torch_index
    sys.modules["verl.utils"].group_mean_std = groupwise.group_mean_std
    functional = real("verl.utils.torch_functional", "utils/torch_functional.py")
    sys.modules["verl.utils"].torch_functional = functional
    algos = real("verl.trainer.ppo.core_algos", "trainer/ppo/core_algos.py")
    return algos, real("verl.trainer.ppo.rollout_corr_helper", "trainer/ppo/rollout_corr_helper.py"), ActorConfig


def make_verl(root):
    algos, correction_helper, ActorConfig = import_verl(root)
    rows = rollouts(2, [5, 7, 3, 1, 6, 4])
    for row in rows[:3]:  # large ratios for the dual clip
        row["logp_old"] = single(np.asarray(row["logp_old"]) - 1.2).tolist()
    advantages = single([-1.5, 0.75, -0.4, 1.1, 0.0, -0.9]).tolist()
    mask = padded(rows, "mask")
    given = {k: padded(rows, k) for k in ["logp_old", "logp_ref", "logp_sampler"]}
    a = torch.tensor(advantages).unsqueeze(1).expand_as(mask)
    log_w = (given["logp_old"] - given["logp_sampler"]) * mask
    aggregations = {
        "token-mean": {"dapo": "vanilla", "cispo": "cispo", "gpg": "gpg"},
        "seq-mean-token-mean": {"grpo": "vanilla", "gspo": "gspo"},
        "seq-mean-token-sum-norm": {"dr_grpo": "vanilla"},
    }
    corrections = [None] + [
        (level, threshold) for level in ["token", "sequence"] for threshold in ["1.3", "0.8_1.25"]
    ]
    cases = []
    for mode, families in aggregations.items():
        for name, function in families.items():
            epsilons = {"gspo": (0.05, 0.08), "cispo": (1.0, 0.3)}.get(name, (0.2, 0.28))
            duals = [1.4, 3.0] if function == "vanilla" else [None]
            kls = [None] if name == "gpg" else [None, "k1", "k2", "k3", "low_var_kl"]
            for dual, kl, correction in itertools.product(duals, kls, corrections):
                config = ActorConfig(
                    clip_ratio=0.2, clip_ratio_low=epsilons[0], clip_ratio_high=epsilons[1], global_batch_info={},
                    clip_ratio_c=dual,
                )
                logp = padded(rows, "logp").requires_grad_()
                weights = None
                options = {
                    "loss": name, "epsilon_low": epsilons[0], "beta": 0.0,
                    "epsilon_high": 1 + epsilons[1] if name == "cispo" else epsilons[1], "dual_clip": dual,
                }
                if correction:
                    level, threshold = correction
                    weights, _ = correction_helper.compute_rollout_correction_weights(
                        log_w, mask, rollout_is=level, rollout_is_threshold=threshold
                    )
                    low, _, high = threshold.rpartition("_")
                    options["correction"] = {
                        "kind": "mis" if low else "tis", "level": level, "max": float(high),
                        "min": float(low) if low else None,
                    }
                loss, _ = algos.get_policy_loss_fn(function)(
                    given["logp_old"], logp, a, mask, loss_agg_mode=mode, config=config, rollout_is_weights=weights
                )
                policy_loss = loss.item()
                if kl:
                    estimate = algos.kl_penalty(logp, given["logp_ref"], kl)
                    loss = loss + 0.3 * algos.agg_loss(estimate, mask, mode)
                    options |= {"beta": 0.3, "kl": "k3" if kl == "low_var_kl" else kl}
                loss.backward()
                cases.append({
                    "verl": {"loss": function, "loss_agg_mode": mode, "kl": kl}, "options": options,
                    "loss": numbers(loss.item()), "policy_loss": numbers(policy_loss),
                    "dlogp": [numbers(g[: len(r["logp"])]) for g, r in zip(logp.grad.tolist(), rows)],
                })

    # Per-token estimates over a range of d = logp_ref - logp, the clamps included.
    ds = single([-25, -21, -20, -5, -1, -0.1, -1e-4, 0, 1e-4, 0.1, 0.7, 1, 2, 2.5, 2.7, 4, 19, 21]).tolist()
    estimates = []
    for kl in ["k1", "k2", "k3", "low_var_kl"]:
        logp = torch.zeros(len(ds)).requires_grad_()
        value = algos.kl_penalty(logp, torch.tensor(ds), kl)
        value.sum().backward()
        estimates.append({"kl": kl, "d": ds, "value": numbers(value), "slope": numbers(logp.grad)})

    scored = []
    for rewards, groups in [
        ([1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 0.75], [0, 0, 0, 0, 1, 1, 1]),
        ([0.3, 0.1, 0.2, 0.9, 0.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1, 1]),
    ]:
        token_rewards = torch.tensor(rewards).unsqueeze(1)
        index = np.array(groups)
        ones = torch.ones(len(rewards), 1)
        for name, function, more in [
            ("grpo", algos.compute_grpo_outcome_advantage, {}),
            ("dr_grpo", algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
            ("rloo", algos.compute_rloo_outcome_advantage, {}),
            ("gpg", algos.compute_gpg_outcome_advantage, {}),
        ]:
            result, _ = function(token_rewards.clone(), ones, index, **more)
            scored.append({
                "advantage": name, "rewards": rewards, "groups": groups, "advantages": numbers(result[:, 0]),
            })

    write("verl", {
        "made_by": {"verl": VERL, "torch": PINNED["torch"]}, "max_completion_length": mask.shape[1],
        "advantages_given": advantages, "rollouts": rows, "estimates": estimates, "advantages": scored,
        "cases": cases,
    })


# --- optimiser and schedules -------------------------------------------------------------------------------


def make_optimizer():
    from transformers import get_scheduler

    peak, steps = 0.02, 12
    rng = np.random.default_rng(3)
    start = single(rng.choice([-1, 1], 24) * rng.uniform(1.0, 3.0, 24))
    gradients = [single(rng.normal(0.0, scale, 24)) for scale in np.geomspace(0.02, 3.0, steps)]
    schedules = [
        ("constant", 0, 0, 0.0, "constant", {}),
        ("constant", 3, 0, 0.0, "constant_with_warmup", {}),
        ("linear", 0, 12, 0.0, "linear", {}),
        ("linear", 3, 12, 0.0, "linear", {}),
        ("linear", 3, 12, 0.1, "polynomial", {"power": 1.0, "lr_end": 0.1 * peak}),
        ("cosine", 0, 12, 0.0, "cosine", {}),
        ("cosine", 3, 12, 0.0, "cosine", {}),
        ("cosine", 3, 12, 0.1, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ]
    cases = []
    for (schedule, warmup, total, floor, name, more), clip, decay in itertools.product(
        schedules, [0.0, 1.0], [0.0, 0.1]
    ):
        parameter = torch.nn.Parameter(torch.tensor(start))
        optimizer = torch.optim.AdamW([parameter], lr=peak, betas=(0.9, 0.99), eps=1e-8, weight_decay=decay)
        # transformers starts a warm-up at rate 0; coevolve's first update already moves (rate 1/warmup): it
        # is one update ahead of transformers during the warm-up and equal to it from the peak on.
        probe = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        scheduler = get_scheduler(
            name, probe, num_warmup_steps=warmup, num_training_steps=total or steps, scheduler_specific_kwargs=more
        )
        theirs = []
        for _ in range(steps + 1):
            theirs.append(scheduler.get_last_lr()[0])
            probe.step()
            scheduler.step()
        rates, norms, path = [], [], []
        for u, gradient in enumerate(gradients):
            rate = theirs[u + 1] if u < warmup else theirs[u]
            optimizer.param_groups[0]["lr"] = rate
            parameter.grad = torch.tensor(gradient)
            norms.append(torch.nn.utils.clip_grad_norm_([parameter], clip or float("inf")).item())
            optimizer.step()
            rates.append(rate)
            path.append(numbers(parameter))
        cases.append({
            "schedule": schedule, "warmup_updates": warmup, "total_updates": total,
            "min_learning_rate_ratio": floor, "transformers": name, "grad_clip": clip, "weight_decay": decay,
            "transformers_rates": numbers(theirs), "rates": numbers(rates), "norms": numbers(norms), "path": path,
        })
    write("optimizer", {
        "made_by": {"torch": PINNED["torch"], "transformers": PINNED["transformers"]}, "learning_rate": peak,
        "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "start": start.tolist(),
        "gradients": [g.tolist() for g in gradients], "cases": cases,
    })


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["trl", "verl", "optimizer"])
    parser.add_argument("--verl", default="verl", help="folder of the unpacked verl wheel")
    arguments = parser.parse_args()
    check_versions()
    for what in arguments.what:
        {"trl": make_trl, "verl": lambda: make_verl(arguments.verl), "optimizer": make_optimizer}[what]()


main()
