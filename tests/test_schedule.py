import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtem import schedule
from dtem.errors import DtemError
from dtem.schedule import Budget, Constant, Inflected, Learned, PerLayer, Ratio

FORMS = [
    (16, "16", Constant(16)),
    (0, "0", Constant(0)),
    (8.0, " 8 ", Constant(8)),
    ((16, -0.5), "16@-0.5", Inflected(16, -0.5)),
    ((16, 1.0), "16@1", Inflected(16, 1.0)),
    ([16, 16, 8, 0], "16/16/8/0", PerLayer((16, 16, 8, 0))),
    ((3, 2, 1), "3/2/1", PerLayer((3, 2, 1))),
    (0.2, "20%", Ratio(0.2)),
    (0.125, "12.5%", Ratio(0.125)),
    (0.3, "0.3", Ratio(0.3)),
    ("2.5G", "2.5g", Budget(2.5)),
    ("learned", " learned ", Learned()),
]


@pytest.mark.parametrize(("value", "text", "expected"), FORMS)
def test_every_form_in_python_and_as_text(value: object, text: str, expected: object) -> None:
    assert schedule.parse(value) == expected
    assert schedule.parse(text) == expected
    assert schedule.parse(expected) is expected
    assert type(schedule.parse(text)) is type(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(16), Constant(16)),
        (np.uint8(16), Constant(16)),
        (np.float32(8), Constant(8)),
        (np.float32(0.25), Ratio(0.25)),
        (np.float64(0.25), Ratio(0.25)),
        (np.array(16), Constant(16)),
        (torch.tensor(16), Constant(16)),
        (Fraction(1, 4), Ratio(0.25)),
        ((np.int64(16), np.float32(-0.5)), Inflected(16, -0.5)),
        ([np.int64(3), 2, np.int8(1)], PerLayer((3, 2, 1))),
        (np.array([3, 2, 1]), PerLayer((3, 2, 1))),
        (torch.tensor([3, 2, 1]), PerLayer((3, 2, 1))),
    ],
    ids=repr,
)
def test_numbers_of_numpy_and_torch_are_numbers(value: object, expected: object) -> None:
    parsed = schedule.parse(value)
    assert parsed == expected
    assert repr(parsed) == repr(expected), "Python's own numbers: they are printed and saved"
    assert schedule.parse(str(parsed)) == expected


@pytest.mark.parametrize("value", [np.array([8, 16]), [np.int64(8), np.float64(16)], (8, np.int32(16))], ids=repr)
def test_several_schedules_may_be_an_array(value: object) -> None:
    assert schedule.parse_list(value) == ["8", "16"]


SCHEDULES = st.one_of(
    st.builds(Constant, st.integers(0, 300)),
    st.builds(Inflected, st.integers(0, 300), st.floats(-1, 1)),
    st.builds(PerLayer, st.lists(st.integers(0, 300), min_size=2, max_size=32).map(tuple)),
    st.builds(Ratio, st.just(0.0) | st.floats(1e-4, 0.5)),  # a smaller share is no token of any image
    st.builds(Budget, st.floats(0.001, 1000)),
)


@pytest.mark.parametrize("expected", [form[2] for form in FORMS])
def test_text_reads_back(expected: object) -> None:
    assert schedule.parse(str(expected)) == expected


@settings(deadline=None, max_examples=200)
@given(SCHEDULES)
def test_text_of_any_schedule_reads_back(expected: schedule.Schedule) -> None:
    """What a record or a file says of a run must be the run's own schedule, to the last digit."""
    assert schedule.parse(str(expected)) == expected


def test_one_block_as_a_list_reads_back() -> None:
    """For a model of one block, a list of one and a constant are the same plan."""
    read = schedule.parse(str(PerLayer((5,))))
    assert schedule.resolve(read, 16, 1) == schedule.resolve(PerLayer((5,)), 16, 1) == (5,)


BAD = [
    (-1, "-1"),
    (-3.0, "-3"),
    ("-1", "-1"),
    (True, "True"),
    (False, "False"),
    (None, "None"),
    (math.nan, "nan"),
    (math.inf, "inf"),
    (-0.1, "-0.1"),
    (1.5, "1.5"),
    (0.6, "0.6"),
    ("60%", "0.6"),
    ("-5%", "-0.05"),
    ("nan%", "nan"),
    ("sixteen", "'sixteen'"),
    ("", "''"),
    ("%", "'%'"),
    ("G", "'G'"),
    ("16.5", "16.5"),
    ("0.2.1", "'0.2.1'"),
    ("16@", "'16@'"),
    ("16@1@1", "'16@1@1'"),
    ("16@2", "2"),
    ("16@nan", "nan"),
    ("16//8", "'16//8'"),
    ("16/-8", "-8"),
    ("0G", "0"),
    ("-2G", "-2"),
    ("nanG", "nan"),
    ("infG", "inf"),
    ([8, -1], "-1"),
    ([8, True], "True"),
    ([8, 0.5], "0.5"),
    ([8, None], "None"),
    (["8", 4], "'8'"),
    ((16, -1.5), "-1.5"),
    ((16, math.nan), "nan"),
    ((1.5, 0.5), "1.5"),
    (b"16", "b'16'"),
    ("t2", "'t2'"),  # thresholds of dtem 0.3
    ("t0.8", "'t0.8'"),
    ("adaptive", "'adaptive'"),
    (np.True_, "True"),
    (np.int64(-1), "-1"),
    (np.float32(math.nan), "nan"),
    (np.array([[1, 2]]), "[1, 2]"),
    (np.array(["a"]), "'a'"),
    (2 + 0j, "(2+0j)"),
    ({16: 1}, "{16: 1}"),
    (object, "object"),
]


@pytest.mark.parametrize(("spec", "named"), BAD, ids=[repr(spec) for spec, _ in BAD])
def test_bad_input_is_refused_by_name(spec: object, named: str) -> None:
    with pytest.raises(DtemError, match=re.escape(named)):
        schedule.parse(spec)


def test_constant_is_clamped_where_tokens_run_out() -> None:
    """DeiT at r = 16: 196 patches, 11 blocks take 16, the last finds 20 and takes half."""
    plan = schedule.resolve(Constant(16), 196, 12)
    assert plan == (16,) * 11 + (10,)
    assert schedule.tokens(plan, 196, 1)[-1] == 11


def test_r_zero_removes_nothing() -> None:
    assert schedule.resolve(Constant(0), 196, 12) == (0,) * 12
    assert schedule.resolve(Ratio(0.0), 196, 12) == (0,) * 12
    assert schedule.resolve(Inflected(0, -1.0), 196, 12) == (0,) * 12
    assert schedule.tokens((0,) * 3, 196, 1) == (197,) * 3


@pytest.mark.parametrize("text", ["5", "5@-1", "5@1", "31.25%", "5.0G"])
def test_one_block(text: str) -> None:
    parsed = schedule.parse(text)
    if isinstance(parsed, Budget):
        parsed = parsed.solve(16, 1, lambda plan: 10.0 - sum(plan))
    assert schedule.resolve(parsed, 16, 1) == (5,)


@pytest.mark.parametrize("patches", [0, 1, 2, 3])
def test_hardly_any_patches(patches: int) -> None:
    for parsed in (Constant(4), Inflected(4, -1.0), PerLayer((4, 4, 4)), Ratio(0.5)):
        plan = schedule.resolve(parsed, patches, 3)
        assert len(plan) == 3
        assert patches - sum(plan) == min(patches, 1)


@pytest.mark.parametrize("depth", [2, 3, 12, 24, 32])
@pytest.mark.parametrize("r", [1, 8, 13, 16])
def test_inflection(r: int, depth: int) -> None:
    falling, flat, rising = (Inflected(r, inflect).per_block(depth) for inflect in (-1.0, 0.0, 1.0))
    assert flat == [r] * depth
    assert (falling[0], falling[-1]) == (2 * r, 0)
    assert (rising[0], rising[-1]) == (0, 2 * r)
    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)
    for inflect in (-1.0, -0.5, 0.3, 1.0):
        wanted = Inflected(r, inflect).per_block(depth)
        assert r - 1 < sum(wanted) / depth <= r, "the mean is r, up to rounding each block down"
        assert all(isinstance(value, int) for value in wanted)


def test_list_must_fit_the_depth() -> None:
    assert schedule.resolve(PerLayer((4, 0, 2)), 16, 3) == (4, 0, 2)
    for wrong in (PerLayer((4, 0)), PerLayer(()), PerLayer((1, 1, 1, 1))):
        with pytest.raises(DtemError, match=rf"{len(wrong.values)} entries.*3 blocks"):
            schedule.resolve(wrong, 16, 3)


def test_ratio_is_a_share_of_what_is_left() -> None:
    assert schedule.resolve(Ratio(0.5), 16, 5) == (8, 4, 2, 1, 0)
    assert schedule.resolve(Ratio(0.25), 100, 3) == (25, 18, 14)


def test_check_names_what_no_block_can_do() -> None:
    schedule.check(Constant(98), 196, 12)
    schedule.check(Ratio(0.5), 196, 12)
    for parsed, largest in ((Constant(99), 99), (Constant(10**9), 10**9), (Inflected(50, -1.0), 100)):
        with pytest.raises(DtemError, match=rf"r = {largest} .*196 patches.*98"):
            schedule.check(parsed, 196, 12)
    with pytest.raises(DtemError, match="120"):
        schedule.check(PerLayer((0, 120, 0)), 196, 3)


@settings(deadline=None, max_examples=200)
@given(SCHEDULES, st.integers(0, 600), st.integers(1, 33))
def test_no_block_removes_more_than_half_of_what_is_left(parsed: schedule.Schedule, patches: int, depth: int) -> None:
    if isinstance(parsed, Budget):
        with pytest.raises(DtemError, match=re.escape(str(parsed))):
            schedule.resolve(parsed, patches, depth)
        return
    if isinstance(parsed, PerLayer):
        depth = len(parsed.values)
    plan = schedule.resolve(parsed, patches, depth)
    assert len(plan) == depth
    left = patches
    for r, wanted in zip(plan, parsed.per_block(depth), strict=True):
        assert type(r) is int
        assert 0 <= r <= left // 2
        most = wanted if isinstance(wanted, int) else int(wanted * left)
        assert r == min(most, left // 2), "clamped only where it must be"
        left -= r
    assert schedule.tokens(plan, patches, 2) == tuple(patches + 2 - sum(plan[: layer + 1]) for layer in range(depth))


def work(plan: tuple[int, ...]) -> float:
    """A made-up cost that falls with every token removed, the more the earlier: linear and quadratic work."""
    left, total = 49, 0.0
    for r in plan:
        total += left * left / 100
        left -= r
        total += left
    return total


@pytest.mark.parametrize("depth", [1, 4, 12])
@pytest.mark.parametrize("share", [0.999, 0.9, 0.7, 0.5])
def test_budget_is_met_and_one_token_fewer_would_not(depth: int, share: float) -> None:
    most, none = work(schedule.clamp([24] * depth, 49)), work((0,) * depth)
    budget = Budget(most + share * (none - most))
    solved = budget.solve(49, depth, work)
    assert isinstance(solved, PerLayer)
    assert work(solved.values) <= budget.gflops

    def spread(total: int) -> tuple[int, ...]:
        every, extra = divmod(total, depth)
        return schedule.clamp([every + 1] * extra + [every] * (depth - extra), 49)

    first = next(total for total in range(24 * depth + 1) if spread(total) == solved.values)
    assert first > 0
    assert all(work(spread(total)) > budget.gflops for total in range(first))
    assert schedule.resolve(solved, 49, depth) == solved.values


def test_a_budget_above_the_cost_of_the_unmerged_model_is_refused() -> None:
    unmerged = work((0,) * 4)
    assert Budget(unmerged).solve(49, 4, work) == PerLayer((0,) * 4)
    with pytest.raises(DtemError, match=rf"1e\+06 GFLOPs is more than .* takes \({unmerged:.3g}\): nothing would"):
        Budget(1e6).solve(49, 4, work)


def test_a_budget_met_only_by_merging_all_is_met() -> None:
    hardest = schedule.clamp([24] * 4, 49)
    assert Budget(work(hardest)).solve(49, 4, work).values == hardest


def test_an_impossible_budget_is_refused_by_name() -> None:
    least = work(schedule.clamp([24] * 4, 49))
    with pytest.raises(DtemError, match=rf"0\.5 GFLOPs cannot be met.*{least:.3g}"):
        Budget(0.5).solve(49, 4, work)


def test_an_unsolved_budget_has_no_plan() -> None:
    with pytest.raises(DtemError, match=r"2\.5G must be solved"):
        schedule.resolve(Budget(2.5), 196, 12)


def test_a_learned_schedule_has_no_plan_without_its_method() -> None:
    schedule.check(Learned(), 64, 4)
    with pytest.raises(DtemError, match="resolved by a handle"):
        schedule.resolve(Learned(), 64, 4)


@pytest.mark.parametrize(("spec", "block"), [(8, 0), ("20%", 0), ([0, 4, 4, 0], 2), ((4, 1.0), 2)])
def test_tokens_removed_outside_the_stages_are_refused(spec: object, block: int) -> None:
    with pytest.raises(DtemError, match=rf"block {block}, .*blocks 1, 3 only.*0/8/0/8"):
        schedule.check(schedule.parse(spec), 64, 4, (1, 3))


@pytest.mark.parametrize("spec", [0, [0, 4, 0, 9], "2.5G", "learned"])
def test_stages_allow_the_rest(spec: object) -> None:
    schedule.check(schedule.parse(spec), 64, 4, (1, 3))


def test_a_budget_can_be_spent_in_some_blocks_only() -> None:
    def cost(plan: tuple[int, ...]) -> float:
        return 100.0 - sum(plan)

    assert Budget(91.0).solve(64, 4, cost, at=(3, 1)).values == (0, 5, 0, 4)
    with pytest.raises(DtemError, match="cannot be met"):
        Budget(51.0).solve(64, 4, cost, at=(1, 3))  # 32 and then 16 are the most
