"""Numbers in the sentences of docs/reproduction.md are those of the records, computed here anew."""

import json
import statistics

from prose_cases import (
    AFTER,
    ALIGNED,
    BARE,
    BEFORE,
    COARSE,
    DEEP,
    FAL,
    FINE,
    FLOAT,
    FUSED,
    GROUPED,
    HELD,
    HGB,
    LARGE_AFTER,
    LARGE_BEFORE,
    LARGE_FAL,
    LARGE_HELD,
    LARGE_SCALES,
    MIXED,
    ONE_CLIP,
    ONE_LOSS,
    PAIRS,
    PLAIN,
    ROOT,
    RULES,
    SCALES,
    SETTINGS,
    SMALL_HGB,
    SMALL_WHOLE,
    STRICT,
    TUNED,
    WHOLE,
    exits,
    gains,
    last_losses,
    mean,
    words,
)

from bicovg.diagnostics import mean_gain
from bicovg.records import Record, seed_values
from bicovg.report.paper import ABLATION, DIAGNOSTICS, MAIN, UNSAID, mean_of
from bicovg.report.record_charts import exit_means


def test_the_table_of_what_was_wanted(records: dict[str, Record], text: str) -> None:
    strict, hgb, fal, small = (records[name] for name in (STRICT, HGB, FAL, SMALL_WHOLE))
    for said in (
        f"| 56 | {mean(strict, *FUSED):.2f}, three seeds: met |",
        f"| 58.5 | {mean(strict, 'mean', 'top1'):.2f}: met; end to end on the same backbone has "
        f"{mean(records[WHOLE], 'last', 'top1'):.2f}, three seeds |",
        f"| 57 | {mean(hgb, *FUSED):.2f}, one seed: met |",
        f"| 72.0 | {mean(fal, *FUSED):.2f}, three seeds: met |",
        f"| 74 | {mean(fal, 'mean', 'top1'):.2f}: met; end to end by the same recipe has "
        f"{mean(small, 'last', 'top1'):.2f}, three seeds; tuned {mean(records[TUNED], 'last', 'top1'):.2f}, one seed |",
        f"much as in the paper ({mean(small, 'last', 'top1'):.2f}, where it prints 70.22)",
    ):
        assert said in text
    assert [len(record["seeds"]) for record in (strict, hgb, fal, records[WHOLE], small)] == [3, 1, 3, 3, 3]


def test_how_much_higher_than_the_papers_full_runs_are(records: dict[str, Record], text: str) -> None:
    full = [one for one in records.values() if one["epochs"] == one["recipe_epochs"] and not one["holdout"]]
    rows = {one["recipe"]: mean(one, *FUSED) for one in full if one["recipe"] in MAIN and MAIN[one["recipe"]][1]}
    above = sorted(value - mean_of(MAIN[recipe][1]) for recipe, value in rows.items())
    assert len(rows) == 5
    assert f"in every full run of BiCovG, fused by {above[0]:.0f} to {above[-1]:.0f} points" in text
    said = sorted(recipe for recipe in rows if MAIN[recipe][1].endswith(UNSAID))
    assert said == ["cifar100-bicovg", "cifar100-bicovg-fal"], "for CIFAR-100 the paper does not say by which rule"


def test_what_fusion_gains_over_the_best_block(records: dict[str, Record], text: str) -> None:
    printed = {recipe: mean_of(fused) - mean_of(best) for recipe, (best, fused) in MAIN.items() if best and fused}
    several = [one for one in records.values() if one["data"] != "digits" and len(one["exit_blocks"]) > 1]
    full = [one for one in several if one["epochs"] == one["recipe_epochs"]]
    gained = {one["name"]: mean(one, *FUSED) - mean(one, "best_test_chosen", "top1") for one in full}
    rows = (STRICT, LARGE_FAL, HGB)
    ours, paper = [gained[name] for name in rows], [printed[records[name]["recipe"]] for name in rows]
    for said in (
        f"is what the paper gains: {min(ours):.1f} to {max(ours):.1f} points on Tiny-ImageNet, in the same three rows "
        f"of the paper {min(paper):.1f} to {max(paper):.1f} ({printed['tiny-imagenet-hgb2']:.1f} in its hgb 2, not run",
        f"worth {min(gained.values()):.1f} to {max(gained.values()):.1f} points over the best block in the full runs",
    ):
        assert said in text
    assert "tiny-imagenet-hgb2" not in records
    assert all(mean(one, "mean", "top1") > mean(one, *FUSED) for one in full), "in no full run is it above the mean"
    assert sum(one["runs"][0]["fusion"]["heldout"] is not None for one in full) == 2, "tried in two"


def test_what_is_said_of_end_to_end(records: dict[str, Record], text: str) -> None:
    strict, hgb, whole, fal = (records[name] for name in (STRICT, HGB, WHOLE, FAL))
    small = mean(records[SMALL_WHOLE], "last", "top1")
    ahead = [mean(fal, *keys) - small for keys in (("last", "top1"), FUSED, ("mean", "top1"))]
    alone, last = mean(whole, "last", "top1"), mean(strict, "last", "top1")
    mine, other = sorted(seed_values(strict, "mean", "top1")), sorted(seed_values(whole, "last", "top1"))
    rules = [mean(hgb, *keys) - alone for keys in (("last", "top1"), FUSED, ("mean", "top1"))]
    for said in (
        f"has {alone:.2f} over three seeds (the paper prints 54.17",
        f"each of its seeds ({mine[0]:.2f} to {mine[-1]:.2f}) above each of end to end's ({other[0]:.2f} to "
        f"{other[-1]:.2f}); its fusion is level ({mean(strict, *FUSED):.2f}); its last exit alone is "
        f"{alone - last:.1f} points below",
        f"by {rules[0]:.1f} points with the last exit, {rules[1]:.1f} with fusion, {rules[2]:.1f} with the mean",
        f"(training loss {last_losses(WHOLE)[0]:.3f} on Tiny-ImageNet,",
        f"by {ahead[0]:.1f} points with the last exit, {ahead[1]:.1f} with fusion fitted on train "
        f"and {ahead[2]:.1f} with the mean",
        f"{last_losses(SMALL_WHOLE)[0]:.4f} on CIFAR-100, where the last exit of strict + FAL has "
        f"{last_losses(FAL)[-1]:.3f})",
        f"tuned, it ends at {last_losses(TUNED)[0]:.3f} and does well",
    ):
        assert said in text
    assert mine[0] > other[-1], "each above each"
    assert abs(mean(strict, *FUSED) - alone) < 0.3
    assert sum(0.32 < loss < 0.63 for loss in last_losses(STRICT)) > 8
    assert all(0.015 < loss < 0.035 for loss in last_losses(HGB)[-3:])


def test_what_is_said_of_end_to_end_tuned(records: dict[str, Record], text: str) -> None:
    held = {name: one["runs"][0]["heldout_top1"][-1] for name, one in records.items() if "bp-tune" in name}
    tried = [held[f"cifar100-bp-tune-{name}"] for name in SETTINGS]
    small, fal, plain, tuned = (records[name] for name in (SMALL_WHOLE, FAL, PLAIN, TUNED))
    best, recipes = mean(tuned, "last", "top1"), mean(small, "last", "top1")
    by_mean, fused, last = (mean(fal, *keys) - best for keys in RULES)
    had = [mean(fal, *keys) - recipes for keys in RULES]
    for said in (
        f"the recipe's own has {tried[0]:.2f} %, five times the rate with a decay of 0.05 {tried[1]:.2f}, with a decay "
        f"of 0.5 {tried[2]:.2f}, and SGD, at 0.05 with a decay of 0.0005 and a clip of 1.0, {tried[3]:.2f} (",
        f"has {best:.2f} on test at full length, one seed: {best - recipes:.1f} points above the recipe's.",
        f"{by_mean:.1f} points ahead by the mean of its exits (it was {had[0]:.1f}), {-fused:.1f} behind with fusion "
        f"({had[1]:.1f} ahead) and {-last:.1f} behind with the last exit ({had[2]:.1f} ahead)",
    ):
        assert said in text
    assert len(held) == 4
    assert max(held, key=lambda name: held[name]) == "cifar100-bp-tune-lr1e-3-wd0.5", "The third"
    decays = {name: records[name]["changes"].get("optim.weight_decay", 0) for name in held}
    assert max(decays, key=lambda name: decays[name]) == "cifar100-bp-tune-lr1e-3-wd0.5", "the largest decay"
    assert tried[2] - tried[3] < 0.6, "level"
    third = records["cifar100-bp-tune-lr1e-3-wd0.5"]["changes"]
    assert tuned["changes"] == third == {"optim.lr": 0.001, "optim.weight_decay": 0.5}
    assert {one["holdout"] for name, one in records.items() if name in held} == {0.1}, "a tenth, 5,000 images"
    seeds = seed_values(small, "last", "top1")
    assert max(by_mean, -fused) < max(seeds) - min(seeds), "no more than noise"
    for said in (
        f"it has {best:.2f} (one seed): about as good as the mean of strict's eight exits "
        f"({mean(plain, 'mean', 'top1'):.2f}), {best - mean(plain, 'last', 'top1'):.1f} points above strict's last",
        f"backprop has {mean(records[DEEP], 'mean', 'top1'):.2f} where strict has "
        f"{mean(records[AFTER], 'mean', 'top1'):.2f} (mean of exits",
    ):
        assert said in words("README.md")


def test_what_is_said_of_reduction_precision_and_clip(records: dict[str, Record], text: str) -> None:
    reductions = [records[name] for name in (FINE, AFTER, COARSE)]
    means, fused = ([f"{mean(one, *keys):.2f}" for one in reductions] for keys in RULES[:2])
    exact, rounded = ([f"{mean(records[name], *keys):.2f}" for keys in RULES] for name in (FLOAT, AFTER))
    unit, one_clip = records[LARGE_AFTER], records[ONE_CLIP]
    lost = gains(unit, one_clip)
    more = mean(records[STRICT], *FUSED) - mean(unit, *FUSED)
    scales = gains(records[LARGE_SCALES], unit)
    wide = gains(records[LARGE_SCALES], records[LARGE_BEFORE])
    shallow, deep = mean_gain(exit_means(records[LARGE_BEFORE]), exit_means(unit))
    points = [float(ABLATION["tiny-imagenet"][name][1]) for name in ("ms", "bicovg")]
    apart = mean(records[LARGE_BEFORE], "mean", "top1") - mean(records[LARGE_BEFORE], *FUSED)
    declines, small = seed_values(records[STRICT], "DA"), seed_values(records[PLAIN], "DA")
    measures = (("DA",), ("TR",), ("fusion", "train", "N_eff"))
    moved = [mean(unit, *keys) - mean(records[LARGE_BEFORE], *keys) for keys in measures]
    for said in (
        f"r = 4, 8 and 16 have means of {means[0]}, {means[1]} and {means[2]} and fusions of {fused[0]}, {fused[1]} "
        f"and {fused[2]}",
        f"float32 has {exact[0]}, {exact[1]} and {exact[2]} by mean, fusion and last exit, bfloat16 {rounded[0]}, "
        f"{rounded[1]} and {rounded[2]}",
        f"the mean is {lost[0]:.1f} points lower, the fusion {lost[1]:.1f} and the last exit {lost[2]:.1f}",
        f"Its fusion has {mean(one_clip, *FUSED):.2f} after 30 epochs, where one clip per unit has "
        f"{mean(unit, *FUSED):.2f}; after 90 the latter gains {more:.1f}",
        f"the paper prints {mean_of(MAIN['tiny-imagenet-bicovg'][1]):.2f}. It cannot",
        f"one clip for all costs {lost[1]:.1f} points fused (Tiny-ImageNet, 30 epochs)",
        f"ahead of BiCovG, by {min(scales):.1f} to {max(scales):.1f} points by mean, fusion and last exit, and of "
        f"per-channel goodness by {wide[0]:.1f} with the mean and {wide[1]:.1f} with fusion",
        f"(the paper's projections add {points[1] - points[0]:.1f} points to the scales)",
        f"the deep half gains {deep:.1f} points over per-channel goodness and the shallow half {shallow:.1f}; in the "
        "paper 4.4 and 2.2",
        f"area (DA) by {moved[0]:.1f} (paper -8.7), tail retention (TR) by {moved[1]:+.3f} (+0.050), the effective "
        f"number of layers (N_eff) by {moved[2]:+.2f} (+0.30)",
        f"BiCovG's DA is {mean(unit, 'DA'):.1f} after 30 epochs on Tiny-ImageNet and {min(declines):.1f} to "
        f"{max(declines):.1f} after 90 ({mean(records[LARGE_HELD], 'DA'):.1f} with 2 % held out)",
        f"between seeds of strict by {max(declines) - min(declines):.1f} there and by {max(small) - min(small):.1f} on",
        f"on CIFAR-100 DA moves by {mean(records[AFTER], 'DA') - mean(records[BEFORE], 'DA'):+.1f}.",
        f"level with its fusion ({100 * apart:.0f} images apart)",
    ):
        assert said in text
    pairs = zip(last_losses(ONE_CLIP), last_losses(LARGE_AFTER), strict=True)
    assert all(mine > other for mine, other in pairs), "every block's training loss higher"
    assert min(scales) > 0
    assert shallow > deep, "most in the shallow half"
    points = DIAGNOSTICS[2]
    assert points[:2] == ("tiny-imagenet", ("per-channel", "bicovg"))
    assert [value > 0 for value in moved] == [float(value) > 0 for value in points[2].split(", ")[2:]], (
        "the paper's way"
    )
    ends = zip(last_losses(FLOAT), last_losses(AFTER), strict=True)
    assert max(abs(mine - other) for mine, other in ends) < 0.002
    new = (FINE, COARSE, FLOAT, LARGE_BEFORE, LARGE_AFTER, LARGE_SCALES, ONE_CLIP, TUNED)
    assert all(len(records[name]["seeds"]) == 1 for name in new)


def test_what_is_said_of_goodness_and_fal(records: dict[str, Record], text: str) -> None:
    before, after, scales, plain, fal = (records[name] for name in (BEFORE, AFTER, SCALES, PLAIN, FAL))
    shallow, deep = mean_gain(exit_means(before), exit_means(after))
    old, new, bare, mixed = exits(before), exits(after), exits(scales), records[MIXED]
    points = {name: float(ABLATION["tiny-imagenet"][name][1]) for name in ("per-channel", "cc", "ms")}
    paper = {name: value - points["per-channel"] for name, value in points.items()}
    rises, soon = gains(fal, plain), gains(records[ALIGNED], after)
    seeds = seed_values(plain, "mean", "top1")
    for said in (
        f"in 100 epochs, the deep half gains {deep:.1f} and the shallow half {shallow:.1f}",
        f"paper +3.9, and {mean(fal, 'DA') - mean(plain, 'DA'):+.1f})",
        f"{new[0]:.1f} instead of {old[0]:.1f} % at the first, {new[1]:.1f} instead of {old[1]:.1f} at the second, "
        f"{new[-1]:.1f} instead of {old[-1]:.1f} at the last",
        f"(the last block at {bare[-1]:.1f}, the mean {mean(after, 'mean', 'top1') - mean(scales, 'mean', 'top1'):.1f} "
        "below), and projections at one scale",
        f"(fused {mean(mixed, *FUSED):.1f} instead of {mean(before, *FUSED):.1f}, the mean "
        f"{mean(mixed, 'mean', 'top1') - mean(before, 'mean', 'top1'):.1f} above, the last block "
        f"{old[-1] - exits(mixed)[-1]:.1f} below; the paper gains {paper['cc']:.1f} by them on Tiny-ImageNet, and "
        f"{paper['ms']:.1f} by the scales, both fused)",
        f"the mean of the exits rises by {rises[0]:.1f}, the fusion by {rises[1]:.1f} and the last block by "
        f"{rises[2]:.1f} (three seeds against two; in 100 epochs by {soon[0]:.1f}, {soon[1]:.1f} and nothing, one seed "
        f"each), where strict's two means differ by {max(seeds) - min(seeds):.1f}",
    ):
        assert said in text
    assert abs(soon[2]) < 0.1, "and nothing"
    assert (len(fal["seeds"]), len(plain["seeds"])) == (3, 2)


def test_what_is_said_of_a_loss_at_every_block(records: dict[str, Record], text: str) -> None:
    deep, strict = ([f"{mean(records[name], *keys):.2f}" for keys in RULES] for name in (DEEP, AFTER))
    once, long = (mean(records[name], "last", "top1") for name in (ONE_LOSS, SMALL_WHOLE))
    rival = records["cifar100-bp-tune-lr1e-3-wd0.5"]
    assert (rival["epochs"], rival["holdout"]) == (records[DEEP]["epochs"], 0.1), "in as many epochs, a tenth fewer"
    assert {one["recipe"] for one in records.values() if "bp-deep" in one["recipe"]} == {"cifar100-bp-deep"}
    assert records[DEEP]["epochs"] < records[DEEP]["recipe_epochs"], "not at full length, nor on Tiny-ImageNet"
    for said in (
        f"{deep[0]} by the mean of its exits, {deep[1]} fused on train and {deep[2]} at the last exit, where strict "
        f"has {strict[0]}, {strict[1]} and {strict[2]}, and where end to end with one loss has {once:.2f}",
        f"on CIFAR-100 100 epochs give {once:.2f} (one seed) and 400 give {long:.2f}.",
        f"costs {gains(records[DEEP], records[AFTER])[0]:.1f} points of the mean, by this recipe. What strict has over "
        f"one loss ({float(strict[0]) - once:.1f} by the mean, {float(strict[2]) - once:.1f} by the last exit) is "
        f"there by this recipe alone: tuned, one loss has {rival['runs'][0]['heldout_top1'][-1]:.2f} in as many epochs",
        f"two blocks + FAL, with four exits, have {mean(records[PAIRS], 'mean', 'top1'):.2f} by the mean, where "
        f"strict + FAL has {mean(records[ALIGNED], 'mean', 'top1'):.2f}",
    ):
        assert said in text
    assert min(gains(records[DEEP], records[AFTER])) > 0, "better than strict by every rule"
    assert once > long, "more training did not help"
    assert len(records[PAIRS]["exit_blocks"]) == 4
    assert mean(records[SMALL_HGB], "mean", "top1") < mean(records[FAL], "mean", "top1"), "no rule"
    models = []
    for name in (DEEP, AFTER):
        model = json.loads((ROOT / "records" / name / "s0" / "config.json").read_text())["model"]
        models.append({key: value for key, value in model.items() if key not in ("scope", "exits")})
    assert models[0] == models[1], "the same goodness"
    new = (DEEP, ONE_LOSS, PAIRS, BARE, GROUPED, SMALL_HGB, LARGE_HELD)
    assert all(len(records[name]["seeds"]) == 1 for name in new)
    alike = ("epochs", "seeds", "parameters", "precision", "exit_blocks")
    assert all(records[DEEP][key] == records[AFTER][key] for key in alike), "the same blocks, goodness and exits"


def test_what_is_said_of_grouped_units_and_batch_norm(records: dict[str, Record], text: str) -> None:
    grouped, plain, hgb, bare = (records[name] for name in (GROUPED, PLAIN, SMALL_HGB, BARE))
    ahead, behind, lost = gains(grouped, records[FAL]), gains(records[FAL], hgb), gains(records[AFTER], bare)
    steps = [mean_of(MAIN[f"cifar100-{row}"][1]) for row in ("bicovg", "bicovg-fal")]
    for said in (
        f"{mean(grouped, 'mean', 'top1'):.2f} by the mean, {mean(grouped, *FUSED):.2f} fused on train and "
        f"{mean(grouped, 'last', 'top1'):.2f} at the last exit, {ahead[0]:.1f}, {ahead[1]:.1f} and {ahead[2]:.1f}",
        f"it gains {gains(grouped, plain)[1]:.1f} points fused, where strict + FAL gains "
        f"{gains(records[FAL], plain)[1]:.1f} and the paper prints {steps[1] - steps[0]:.1f} (not",
        f"{mean(hgb, 'mean', 'top1'):.2f} by their mean, {mean(hgb, *FUSED):.2f} fused on train, "
        f"{mean(hgb, 'last', 'top1'):.2f} at the last, {behind[0]:.1f} and {behind[1]:.1f} points below strict + FAL "
        f"by the first two and {-behind[2]:.1f} above by the last; its last exit ends with a training loss of "
        f"{last_losses(SMALL_HGB)[-1]:.3f}. On Tiny-ImageNet it is "
        f"{gains(records[HGB], records[LARGE_FAL])[0]:.1f} points above strict + FAL",
        f"mean falls by {lost[0]:.1f} points, the fusion by {lost[1]:.1f} and the last block by {lost[2]:.1f} in 100",
        f"Its {mean(bare, *FUSED):.2f} fused is near the {steps[0]:.2f} that",
        f"{lost[1]:.1f} points fused in 100 epochs (CIFAR-100); but without it {mean(bare, *FUSED):.2f} is near the "
        f"{steps[0]:.2f} that the paper prints for 400",
        f"grouped + FAL gains {gains(grouped, plain)[1]:.1f} points over strict, strict + FAL "
        f"{gains(records[FAL], plain)[1]:.1f}, the paper's FAL {steps[1] - steps[0]:.1f}, a hint at grouped; but "
        f"strict + FAL ({mean(records[FAL], *FUSED):.2f}) is nearer to the paper's {steps[1]:.2f} than grouped "
        f"({mean(grouped, *FUSED):.2f})",
    ):
        assert said in text


def test_what_is_said_of_fusion_on_held_out_images(records: dict[str, Record], text: str) -> None:
    small, large = (records[name]["runs"][0] for name in (HELD, LARGE_HELD))
    below = {
        name: [run["mean"]["top1"] - run["fusion"][name]["top1"] for run in (small, large)]
        for name in ("train", "heldout", "heldout_temperatures")
    }
    first = [run["fusion"]["heldout"]["weights"][0] for run in (small, large)]
    seeds, others = (seed_values(records[name], "mean", "top1") for name in (STRICT, PLAIN))
    images = [round(-100 * gain) for gain in below["heldout_temperatures"]]
    for said in (
        f"({first[0]:.2f} on CIFAR-100, {first[1]:.2f} on Tiny-ImageNet)",
        f"below the mean by {below['heldout'][0]:.1f} and {below['heldout'][1]:.1f} points (fitted on train: "
        f"{below['train'][0]:.1f} and {below['train'][1]:.1f})",
        f"above the mean by {images[0]} and {images[1]} of the 10,000 test images",
        f"costs {statistics.fmean(seeds) - large['mean']['top1']:.1f} points on Tiny-ImageNet, whose net then has a "
        f"mean of {large['mean']['top1']:.2f}, below all three seeds that had every image ({min(seeds):.2f} to "
        f"{max(seeds):.2f}), and nothing that shows on CIFAR-100: {small['mean']['top1']:.2f}, between strict's two "
        f"({min(others):.2f} and {max(others):.2f})",
    ):
        assert said in text
    assert large["mean"]["top1"] < min(seeds)
    assert min(others) < small["mean"]["top1"] < max(others)
    assert min(images) > 0
    assert max(images) < 40, "no more than noise"
    many = {name: one for name, one in records.items() if one["data"] != "digits" and len(one["exit_blocks"]) > 1}
    ahead = {name: mean(one, *FUSED) - mean(one, "mean", "top1") for name, one in many.items()}
    assert {name for name, points in ahead.items() if points > 0} == {DEEP, BEFORE, MIXED}
    assert all(many[name]["epochs"] < many[name]["recipe_epochs"] for name in (DEEP, BEFORE, MIXED)), "every full run"
    assert ahead[DEEP] < 0.2, "the same within 0.2"


def test_what_is_said_of_fal_on_tiny_imagenet(records: dict[str, Record], text: str) -> None:
    strict, fal = records[STRICT], records[LARGE_FAL]
    shallow, deep = mean_gain(exit_means(strict), exit_means(fal))
    lost = [-gain for gain in gains(fal, strict)]
    paper = mean_of(MAIN[strict["recipe"]][1]) - mean_of(MAIN[fal["recipe"]][1])
    for said in (
        f"half of the blocks lose {-shallow:.1f} and {-deep:.1f} points, where the paper gains 0.7 and 1.5",
        f"more than FAL changes it ({mean(fal, 'DA') - mean(strict, 'DA'):+.1f}, paper",
        f"mean falls by {lost[0]:.1f}, the fusion by {lost[1]:.1f} and the last block by {lost[2]:.1f}, three standard",
        f"in the paper the fusion falls by {paper:.1f}",
    ):
        assert said in text
    for points, keys in zip(lost, RULES, strict=True):
        assert points > 2.9 * statistics.stdev(seed_values(strict, *keys)), "three standard deviations"
    first = 2  # the first block with a FAL before it
    for seed in strict["seeds"]:
        pairs = zip(last_losses(LARGE_FAL), last_losses(STRICT, seed), strict=True)
        assert all(mine < other for mine, other in list(pairs)[first:])
        known = next(run for run in strict["runs"] if run["seed"] == seed)["exits"]["top1"]
        ahead = [mine - other for mine, other in zip(exits(fal), known, strict=True)]
        assert ahead[first] > 0
        assert all(gain < 0 for gain in ahead[first + 2 :])
