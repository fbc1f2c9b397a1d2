"""The judge of rehearsals, asked as stages ask an endpoint."""

from configs.execution import Placement
from configs.rating import EndpointJudge
from pipelines.rehearsal.judge import rating, serve
from stages.core.rating import parse_rating
from stages.engines.endpoint import ChatServer


def test_it_is_asked_as_any_endpoint_and_gives_the_same_ratings_from_the_same_place(tmp_path):
    url = serve(tmp_path)
    questions = [[{"role": "user", "content": f"Rate answer {number}."}] for number in range(12)]
    found: dict[int, str] = {}
    server = ChatServer(EndpointJudge(type="endpoint", base_url=url, model="gpt"), Placement(endpoint_concurrency=4))
    bodies = ((number, {"model": "gpt", "messages": messages}) for number, messages in enumerate(questions))
    server.ask(bodies, lambda number, reply: found.__setitem__(number, reply.text))  # pyright: ignore[reportAttributeAccessIssue]
    ratings = [parse_rating(found[number]) for number in range(12)]
    assert ratings == [rating(messages) for messages in questions] and len(set(ratings)) > 1
    assert (tmp_path / "judge.port").read_text() in url
    assert serve(tmp_path) != url  # its port is taken: another one is as good
