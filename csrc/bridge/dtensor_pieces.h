// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bridge {

/// Finds the DTensors of which this rank may hold other boxes than the one that DCP computes. Needs the GIL.
///
/// They are those with placements other than Shard and Replicate, or of which several axes of the mesh shard one dim,
/// or whose mesh has its ranks in another order than its process groups. `pieces_of` is called once for each mesh,
/// placements, order and shape, and `is_in_order` once for each mesh.
///
/// \param order_of   Function from a DTensor to the order in which the axes of its mesh shard it, which can be hashed.
/// \param pieces_of  Function from a DTensor to its pieces, or None if DCP is right. What it raises becomes an
/// InvalidPlanError that names the key.
/// \param is_in_order  Function from a mesh to whether this rank stands in its groups where it stands in the mesh.
/// \returns the pieces by key, of those where they are not None.
pybind11::dict find_pieces(const pybind11::dict& flat, const pybind11::object& order_of,
                           const pybind11::object& pieces_of, const pybind11::object& is_in_order);

}  // namespace bytecheckpoint::bridge
