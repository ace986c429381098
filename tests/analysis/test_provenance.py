"""Places of decisions as nodes of the Dynamo graph: what was recorded for one program says where it is in another."""

import json

from omnicomp.analysis.provenance import Places

ONE = Places(("m.py:3", "m.py:4", ""), ("layers.0.attn", "layers.0.mlp", ""))
MOVED = Places(("n.py:13", "n.py:15", ""), ("model.layers.0.attn", "model.layers.0.mlp", ""))
RECORD = [
    {
        "type": "placement",
        "declined": [{"node": "topk", "source": "m.py:4", "module": "layers.0.mlp", "chain": [{"source": "m.py:3"}]}],
    },
    {"type": "subgraph", "sources": ["m.py:3", "x.py:9"], "modules": ["layers.0.attn"], "module": "layers.0"},
    {"type": "boundary", "source": "@.0", "target": "@.1"},
    {"type": "subgraph", "sources": [], "modules": [], "module": ""},
]


def test_what_is_left_out_is_filled_in_again() -> None:
    kept = json.loads(json.dumps(ONE.leave_out(RECORD)))
    assert "m.py" not in json.dumps(kept)
    assert "layers" not in json.dumps(kept)
    assert ONE.fill_in(kept) == RECORD


def test_a_record_tells_the_places_of_the_graph_that_it_is_read_for() -> None:
    (placement, subgraph, boundary, empty) = MOVED.fill_in(ONE.leave_out(RECORD))
    (declined,) = placement["declined"]
    assert (declined["node"], declined["source"], declined["module"]) == ("topk", "n.py:15", "model.layers.0.mlp")
    assert declined["chain"] == [{"source": "n.py:13"}]
    # What no node of the graph has stays as it was.
    assert subgraph["sources"] == ["n.py:13", "x.py:9"]
    assert (subgraph["modules"], subgraph["module"]) == (["model.layers.0.attn"], "model.layers.0")
    assert (boundary, empty) == (RECORD[2], RECORD[3])


def test_equal_records_of_programs_at_other_places_are_equal() -> None:
    assert ONE.leave_out(RECORD[0]) == MOVED.leave_out(MOVED.fill_in(ONE.leave_out(RECORD[0])))


def test_a_node_that_is_not_there_has_no_place() -> None:
    assert Places().fill_in(ONE.leave_out({"source": "m.py:4", "module": "layers.0"})) == {"source": "", "module": ""}
