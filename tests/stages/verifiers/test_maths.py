"""Where an answer is looked for, what equals it, and that nobody waits for algebra for ever."""

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from sweeps import nightly_after
from waiting import deadline

from pedigree.configs.base.problems import PedigreeError
from pedigree.stages.verifiers import VerifierError, algebra, check, minerva, verify, worker
from pedigree.stages.verifiers.maths import candidates, equal
from pedigree.stages.verifiers.minerva import normalised


@pytest.fixture(autouse=True, scope="module")
def ended():
    yield
    worker.end()


PLACES = [
    (r"so \boxed{1} and at last \boxed{\frac{1}{2}}.", [r"\frac{1}{2}"]),
    (r"so \boxed 5$.", ["5"]),
    (r"so \fbox{7}", ["7"]),
    (r"so \boxed{7", None),  # never closed: the next rule
    ("Final Answer: The final answer is $x+1$. I hope it is correct.", ["x+1"]),
    (r"\boxed{3} Final Answer: The final answer is 4. I hope it is correct.", ["3", "4"]),
    ("it is $a$, then $b$.", ["b"]),
    ("costs 5$, it is $a$", ["a"]),
    ("forty-two", ["forty-two"]),
    (r"They cost \$5 and \$6, $x$ in all", ["x"]),
    (r"\$29.00", [r"\$29.00"]),
    (r"it is \(a\), then \(b\).", ["b"]),
    (r"Since $a = 3$, \[b = 5\]", ["b = 5"]),
    ("So $$5$$", ["5"]),
    ("The answer is 5.", ["5."]),
    ("Since $x = 3$, the answer is **5**.", ["5."]),  # what is stated, no formula before it
    ("**Final Answer:** $5$ or $6$", ["$5$ or $6$"]),  # all of it
    ("### Answer\n\n5", ["5"]),
    ("Answer: 2**3", ["2**3"]),
    ("The answer is 5 cm, because $a = 3$. Good!", ["5 cm"]),
    ("The answer is not obvious, but $x = 6$", ["not obvious, but $x = 6$"]),
    ("The answer is not obvious.\nSo $x = 6$", ["x = 6"]),
    ("The answer is 4. No, the answer is 5. I hope it helps.", ["5"]),
]


STATED = [  # (text, right answer, score)
    ("The answer is therefore $7$.", "7", 1),
    (r"The answer is clearly \(7\).", "7", 1),
    ("So the final answer is just $7$.", "7", 1),
    ("The answer is then $x = 7$.", "7", 1),
    ("The answer is, therefore, $7$.", "7", 1),
    ("The final answer is thus: $7$", "7", 1),
    ("The answer is the number **$7$**.", "7", 1),
    ("the answer is simply **7**", "7", 1),
    ("The answer is exactly $7$, because $3 + 4 = 7$.", "7", 1),
    ("The answer is $7$ (seven).", "7", 1),
    ("The answer is therefore 21 (twenty-one).", "21", 1),
    ("The answer is then always.", "always", 1),
    ("The answer is exactly one.", "exactly one", 1),
    ("The answer is not $7$ but 8", "7", 0),
    ("The answer is clearly not $7$.", "7", 0),
    ("The answer is then less than $7$.", "7", 0),
    ("The answer is simply over $7$.", "7", 0),
    ("The answer is only $7$ more than $2$.", "7", 0),
    ("The answer is nearly $7$.", "7", 0),
    ("The answer is twice $7$.", "7", 0),
    ("The answer is the number of divisors of $7$.", "7", 0),
    ("The answer is therefore $7$ or $8$.", "7", 0),
    ("The answer is $7$ (seven or eight).", "7", 0),
    ("The answer is $7$ (mod 10).", "7", 0),
    ("The answer is therefore $5$ m.", "5 cm", 0),
    ("The answer is therefore **", "7", 0),
    ("The answer is (A) Paris.", "A", 1),
    ("The answer is therefore **(A) Paris**.", "(A)", 1),
    (r"\boxed{(A) War and Peace}", "A", 1),
    ("The answer is option (C).", "C", 1),
    ("The answer is (B) Paris.", "A", 0),
    ("The answer is not (A) Paris.", "A", 0),
    ("The answer is (A) or B.", "A", 0),
    ("The answer is (A) and not B.", "A", 0),
    ("The answer is (A) is wrong.", "A", 0),
]


@pytest.mark.parametrize(("text", "answer", "score"), STATED)
def test_words_around_a_stated_answer_count_only_if_they_change_it(text, answer, score):
    assert verify({"name": "math", "answer": answer}, text).score == score


@pytest.mark.parametrize(("text", "found"), PLACES)
def test_the_answer_is_looked_for_in_its_places(text, found):
    assert candidates(text) == ([text] if found is None else found)


def test_a_ground_truth_may_be_boxed_or_a_whole_solution():
    for answer in (r"\boxed{12}", r"Six and six are $6+6=\boxed{12}$."):
        scores = [verify({"name": name, "answer": answer}, "12").score for name in ("math", "strict_math")]
        assert scores == [1.0, 1.0]
    assert verify({"name": "math", "answer": r"Not 5 but $\boxed{12}$"}, "5").score == 0.0


def table(name):
    return yaml.safe_load(Path(__file__).with_name(f"{name}_answers.yaml").read_text())


@pytest.mark.parametrize("kind", table("equal"))
def test_equal_answers_are_equal_whichever_is_the_right_one(kind):
    for one, other, reason in table("equal")[kind]:
        assert algebra.equal(one, other) is algebra.equal(other, one) is True, (one, other, reason)


@pytest.mark.parametrize("turned", nightly_after(1, [1, 0]))
def test_no_two_different_answers_are_equal(turned):
    """`turned`: which half of the pairs has the other answer as the right one; over both, each pair is compared in both directions."""
    answers = [answer for rows in table("different").values() for answer, _ in rows]
    assert len(answers) == len({*answers}) > 250
    pairs = list(itertools.combinations(answers, 2))
    assert not [pair for pair in (*pairs[1 - turned :: 2], *(pair[::-1] for pair in pairs[turned::2])) if algebra.equal(*pair)]


@pytest.mark.parametrize("kind", table("different"))
def test_each_answer_equals_itself(kind):
    for answer, _ in table("different")[kind]:
        assert algebra.equal(answer, f" ${answer}$ "), answer


UNDECIDED = [
    (r"50\%", "50"),  # a question may ask for percent
    ("1, 2", "2, 1"),  # solutions or a sequence
    ("1, 2", "(1, 2)"),  # coordinates
    ("1, 2", r"\{2, 1\}"),  # elements
    ("(1, 2)", "1 < x < 2"),  # a pair or an interval
    ("(1, 2)", "x = 1, y = 2"),  # coordinates
    ("9^{9^{9}}", "5"),  # too large to compute
]


@pytest.mark.parametrize(("one", "other"), UNDECIDED)
def test_what_only_the_question_tells_is_undecided(one, other):
    assert algebra.equal(one, other) is algebra.equal(other, one) is None


HOSTILE = [
    "9^{9^{9}}", "9^{9^{9^{9}}}", "99999!", "((9!)!)!", "3!!!!!!", r"\binom{10^9}{10^8}", "10^{10^{10}}", "2^{99999999}", "x^{99999999}",
    "e^{e^{e^{e^{e^{5}}}}}", r"\pi^{\pi^{\pi^{\pi^{\pi}}}}", "(e^{100})!", "1e999", "1e99999999", "{" * 450 + "5" + "}" * 450, "(" * 900,
    r"\sqrt" * 150 + "2", r"\frac" * 190, r"\sin" * 240 + "x", "-" * 900 + "5", "1+" * 450 + "1", "x" * 900, "|" * 900, "5" + "!" * 900,
    r"\pm" * 300 + "5", ",".join(["x"] * 450), r"\{" + ",".join(map(str, range(250))) + r"\}", "(x+1)^{9999}", "7" * 990, "1/" * 400 + "1",
    r"\text{" * 150, r"\begin{pmatrix}" * 60, "(x+1)" * 190, r"\sin(x)" * 140, "x^x" * 300, r"\overline{" * 90, "0." + r"\overline{3}" * 80,
    "0." + "12" * 480 + "...", "0." + "1" * 950 + "2...", "1.1" * 300 + "...", "[1,2]" + "".join(rf"\cup[{n},{n}.5]" for n in range(3, 90)),
    ",".join(rf"x \ne {n}" for n in range(100)), "1:" * 450 + "1", "1 hour " * 130, r"\{x|" * 200,
    r"\left\{\begin{array}" * 40, "f(x)=" * 180,
    r"\sqrt{10^{9000}}", r"(10^{9000}\sqrt{2})^{9000}", "((x^{9999})^{9999})^{9999}", r"\lfloor e^{e^{9}} \rfloor", "(1+x)" + "^{2}" * 200,
]  # fmt: skip


def test_hostile_answers_are_not_equal_and_cost_little():
    began = time.process_time()
    for answer in HOSTILE:
        assert not algebra.equal(answer, "5"), answer
        assert not algebra.equal(answer, r"\sqrt{2}+x"), answer
    assert time.process_time() - began < 10


@pytest.mark.parametrize("answer", [r".\overline", r"5.\overline", r"5+.\overline{x}", r"\text{.\overline}"])
def test_a_repeating_decimal_without_digits_is_a_text(answer):
    assert verify({"name": "math", "answer": "5"}, rf"\boxed{{{answer}}}").score == 0
    assert verify({"name": "math", "answer": answer}, rf"\boxed{{{answer}}}").score == 1


def test_no_text_of_an_answer_is_evaluated(monkeypatch):
    """As sympy evaluates texts in tuples that are compared with its numbers."""
    monkeypatch.setattr("sympy.parsing.sympy_parser.eval_expr", lambda *_: pytest.fail("evaluated"))
    nodes = [
        "5", "x", "(5, x)", r"\{5\}", "x = 5", "5, x", "5 cm", "1:2", "(1, 2]", r"x \in (1, 2]", r"5 \approx 5.0", "print(5)", "9^{9^{9}}",
    ]  # fmt: skip
    for one, other in itertools.product(nodes, nodes):
        algebra.equal(one, other)


SAME_TEXT = [
    (r"\frac12", r"\dfrac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    ("3/4", r"\tfrac{3}{4}"),
    ("1,000", "1000"),
    ("x = 5", "5"),
    (r"5\text{ cm}", "5"),
    (r"90^\circ", "90"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"\text{Tuesday}", "Tuesday"),
    ("$12", "12"),
    (r"50\%", "50"),
    (".25", "0.25"),
]


@pytest.mark.parametrize(("one", "other"), SAME_TEXT)
def test_the_published_normalisation(one, other):
    assert normalised(one) == normalised(other)


BY_ALGEBRA = [
    (r"\frac{2}{4}", r"\frac{1}{2}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("(1,2)", "(2,1)", False),
    ("x+1", "x-1", False),
    ("5", "6", False),
    ("", "5", False),
    ("a" * 5000, "5", False),
]


@pytest.mark.parametrize(("one", "other", "same"), BY_ALGEBRA)
def test_algebra_decides_where_texts_differ(one, other, same):
    assert equal(one, other) is minerva.equal(one, other) is same


def test_the_published_rule_is_kept_under_its_name():
    assert verify({"name": "minerva_math", "answer": "1,2"}, r"\boxed{12}").score == 1
    assert verify({"name": "math", "answer": "1,2"}, r"\boxed{12}").score == 0
    reply = r"It is 5\text{ apples}"
    assert verify({"name": "strict_minerva_math", "answer": reply.replace(r"\text{ apples}", "")}, reply).score == 1
    assert verify({"name": "strict_math", "answer": reply.replace(r"\text{ apples}", "")}, reply).score == 0


def test_flex_takes_any_place_and_strict_only_minervas():
    boxed, minerva = r"\boxed{\frac{2}{4}}", r"Final Answer: The final answer is $\frac{2}{4}$. I hope it is correct."
    flex, strict = ({"name": name, "answer": r"\frac{1}{2}"} for name in ("math", "strict_math"))
    assert (verify(flex, boxed).score, verify(strict, boxed).score) == (1.0, 0.0)
    assert (verify(flex, minerva).score, verify(strict, minerva).score) == (1.0, 1.0)
    assert verify(strict | {"name": "strict_minerva_math"}, boxed).reason == "no answer in its place"


@pytest.mark.parametrize(
    ("text", "score"), [("5", 1.0), ("$5$\n", 1.0), ("x = 5", 1.0), ("6", 0.0), ("It is 5", 0.0), (r"So \boxed{5}", 0.0)]
)
def test_without_minervas_sentence_strict_takes_a_reply_that_is_the_answer_and_nothing_else(text, score):
    assert verify({"name": "strict_math", "answer": "5"}, text).score == score
    wrong = f"{text}\nFinal Answer: The final answer is $7$. I hope it is correct."
    assert verify({"name": "strict_math", "answer": "5"}, wrong).score == 0


def test_what_takes_too_long_is_no_verdict_and_the_next_question_is_answered(monkeypatch):
    monkeypatch.setattr(minerva, "SECONDS", 1.0)
    with pytest.raises(VerifierError, match="no answer within 1 s"):
        verify({"name": "minerva_math", "answer": "5"}, r"\boxed{9^{9^{9^{9}}}}")
    monkeypatch.undo()
    assert verify({"name": "math", "answer": "5"}, r"\boxed{\frac{10}{2}}").score == 1.0


def test_a_process_that_ends_over_a_question_is_no_verdict():
    with pytest.raises(PedigreeError, match="ended"):
        worker.ask("os:_exit", (3,), deadline(60))
    assert worker.ask("os:getpid", (), deadline(60)) != os.getpid()


def test_the_process_outlives_the_thread_that_asked_first():
    """As each suite is verified by threads of its own."""
    half, pids = {"name": "math", "answer": r"\frac{1}{2}"}, []
    worker.end()
    for _ in range(3):
        with ThreadPoolExecutor(1) as threads:
            given = [r"\boxed{0.50}", r"\boxed{2/4}"]
            assert [verdict.score for verdict in threads.map(lambda text: verify(half, text), given)] == [1.0, 1.0]
            pids.append(threads.submit(worker.ask, "os:getpid", (), deadline(60)).result())
        time.sleep(0.2)  # nothing is to happen, and a signal of a thread's death need not be there at once
    assert len(set(pids)) == 1


def test_calls_of_several_threads_run_in_several_processes(monkeypatch, tmp_path):
    """Each end of a named pipe opens when the other one does."""
    monkeypatch.setattr(worker, "_places", threading.Semaphore(2))
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(worker.ask, "os:open", (tmp_path / "pipe", flag), deadline(20)) for flag in (os.O_RDONLY, os.O_WRONLY)]
        assert all(end.result() > 2 for end in ends)


def test_a_process_that_was_killed_between_questions_says_nothing_about_the_next():
    os.kill(worker.ask("os:getpid", (), deadline(60)), signal.SIGKILL)
    worker._idle[-1].process.wait()
    assert worker.ask("operator:add", (1, 2), deadline(60)) == 3


@pytest.mark.parametrize("verifier", [{"name": "math"}, {"name": "math", "answer": 5}, {"name": "strict_math", "answer": " "}])
def test_a_malformed_verifier_is_an_error(verifier):
    with pytest.raises(VerifierError):
        check(verifier)
