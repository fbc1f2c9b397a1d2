"""The judge and writer of rehearsals, asked as stages ask an endpoint."""

from pedigree.configs.judging.synthesis import SelfInstruct
from pedigree.configs.language.execution import Placement
from pedigree.configs.methods.language_model import ByEndpoint
from pedigree.pipelines.rehearsal.judge import answer, rating, serve
from pedigree.stages.core.rating import parse_rating
from pedigree.stages.sampling.endpoint import ChatServer
from pedigree.stages.synthesize.novelty import rouge_l
from pedigree.stages.synthesize.writing import read_prompts, writing_question


def test_it_is_asked_as_any_endpoint_and_gives_the_same_ratings_from_the_same_place(tmp_path):
    url = serve(tmp_path)
    questions = [[{"role": "user", "content": f"Rate answer {number}."}] for number in range(12)]
    found: dict[int, str] = {}
    server = ChatServer(ByEndpoint(type="endpoint", base_url=url, model="gpt"), Placement(endpoint_concurrency=4))
    bodies = ((number, {"model": "gpt", "messages": messages}) for number, messages in enumerate(questions))
    server.ask(bodies, lambda number, reply: found.__setitem__(number, reply.text))  # pyright: ignore[reportAttributeAccessIssue]
    ratings = [parse_rating(found[number]) for number in range(12)]
    assert ratings == [rating(messages) for messages in questions] and len(set(ratings)) > 1
    assert (tmp_path / "judge.port").read_text() in url
    assert serve(tmp_path) != url  # its port is taken: another one is as good


def test_who_asks_for_a_prompt_gets_one_that_resembles_no_other():
    method = SelfInstruct(type="self_instruct", requests=9, shots=1, prompts=4)
    replies = [answer(writing_question(method, [f"Example {number}"])) for number in range(9)]
    texts = [prompts[0].split() for reply in replies if isinstance(prompts := read_prompts(reply, 4), list)]
    assert len(texts) == 9 and all(rouge_l(one, other) < 0.7 for one in texts for other in texts if one is not other)
