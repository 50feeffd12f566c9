"""The vocabularies and the order of a mesh's axes."""

import itertools

from spmdlab.axes import ACTIVATION_AXES, LOGICAL_AXES, MESH_AXES, WEIGHT_AXES, mesh_order


def test_activations_and_weights_share_no_name():
    assert not set(WEIGHT_AXES) & set(ACTIVATION_AXES)
    assert all(name.startswith("act_") for name in ACTIVATION_AXES)
    assert set(LOGICAL_AXES) == set(WEIGHT_AXES) | set(ACTIVATION_AXES)


def test_mesh_order_is_that_of_the_table_however_the_axes_come():
    expected = ["data", "stage", "fsdp", "expert", "context", "spatial", "tensor"]
    assert list(MESH_AXES) == expected
    for axes in itertools.permutations(expected):
        assert sorted(axes, key=mesh_order) == expected


def test_axes_of_a_users_own_go_just_outside_tensor_by_name():
    assert sorted(["tensor", "ring", "context", "apple"], key=mesh_order) == [
        "context",
        "apple",
        "ring",
        "tensor",
    ]
