from wavetrain.base.errors import MOST_SHOWN, InputError, Problem, nearest


def test_a_problem_says_what_where_rule_legal_nearest_remedy():
    problem = Problem(
        where="model.yaml:4",
        key="heads",
        value=6,
        rule="must divide hidden (4096)",
        legal=("1", "2", "4", "8"),
        nearest=("4", "8"),
        remedy="heads: 8",
    )
    assert str(problem) == (
        "model.yaml:4  heads: 6\n"
        "    must divide hidden (4096)\n"
        "    possible: 1, 2, 4, 8\n"
        "    nearest: 4 or 8\n"
        "    try: heads: 8"
    )


def test_long_lists_are_cut_and_counted():
    problem = Problem(where="x", rule="r", legal=tuple(map(str, range(100))))
    assert str(problem).endswith("11, ...")
    error = InputError([problem] * (MOST_SHOWN + 3))
    assert str(error).endswith("and 3 more")


def test_hostile_names_are_escaped():
    assert "\x1b" not in str(Problem(where="a\x1b[2J", key="k\n", value="\u202e", rule="r"))


def test_nearest():
    assert nearest("Hiden", ["hidden", "heads"]) == ("hidden",)
    assert nearest("zzz", ["hidden"]) == ()
    assert nearest("x" * 10**6, ["hidden"]) == ()
