"""Hollow meshes, and exact distances from their triangles: a judge that knows nothing of the check."""

from itertools import pairwise

import numpy as np

WALL = 0.006  # m


def revolved(profile: np.ndarray, count: int = 40) -> np.ndarray:
    """Triangles of a closed ``profile`` [N, 2] of radius and height, turned about z."""
    angle = np.linspace(0, 2 * np.pi, count, endpoint=False)
    ring = np.stack((np.cos(angle), np.sin(angle)), axis=1)
    heights = np.broadcast_to(profile[:, None, 1:], (len(profile), count, 1))
    a = np.concatenate((profile[:, None, :1] * ring, heights), axis=2)
    b = np.roll(a, -1, axis=0)
    a2, b2 = np.roll(a, -1, axis=1), np.roll(b, -1, axis=1)
    return np.concatenate([np.stack(each, axis=2).reshape(-1, 3, 3) for each in ((a, a2, b2), (a, b2, b))])


def ring_of(radius: float, tube: float, count: int = 24) -> np.ndarray:
    angle = np.linspace(0, 2 * np.pi, count, endpoint=False)
    return revolved(np.stack((radius + tube * np.cos(angle), tube * np.sin(angle)), axis=1))


def pipe_of(inner: float, length: float) -> np.ndarray:
    """A pipe with a wall, from 0 along z."""
    outer = inner + WALL
    return revolved(np.array([[inner, 0.0], [outer, 0.0], [outer, length], [inner, length]]))


def bin_of(size: np.ndarray) -> np.ndarray:
    """A bin with walls, open at the top, of the inner ``size``; its floor is at 0."""
    square = np.array([[-0.5, -0.5, 0], [0.5, -0.5, 0], [0.5, 0.5, 0], [-0.5, 0.5, 0]])
    inner, outer = (square * [size[0] + more, size[1] + more, 0] for more in (0, 2 * WALL))
    up, down = np.array([0, 0, size[2]]), np.array([0, 0, -WALL])
    loops = [outer + down, outer + up, inner + up, inner]
    found = [[loops[0][k] for k in (0, 2, 1)], [loops[0][k] for k in (0, 3, 2)]]
    found += [[loops[3][k] for k in (0, 1, 2)], [loops[3][k] for k in (0, 2, 3)]]
    for low, high in pairwise(loops):
        for k in range(4):
            a, b, c, d = low[k], low[k - 3], high[k - 3], high[k]
            found += [[a, b, c], [a, c, d]]
    return np.array(found)


def sheets_of(size: np.ndarray) -> np.ndarray:
    """The same bin of sheets without thickness: a mesh that is not closed."""
    x, y, z = np.diag(size)
    low = np.array([-size[0] / 2, -size[1] / 2, 0])
    sides = [(low, x, y), (low, x, z), (low, y, z), (low + y, x, z), (low + x, y, z)]
    return np.array([each for a, u, v in sides for each in ([a, a + u, a + u + v], [a, a + u + v, a + v])])


def gaps(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Distances of ``points`` [K, 3] from the nearest of ``triangles`` [N, 3, 3]: from their planes or edges."""
    a, edges = triangles, np.roll(triangles, -1, axis=1) - triangles
    normal = np.cross(edges[:, 0], edges[:, 1])
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    to = points[:, None, None, :] - a  # [K, N, 3, 3]
    share = np.clip((to * edges).sum(axis=-1) / (edges**2).sum(axis=-1), 0, 1)
    beside = np.linalg.norm(to - share[..., None] * edges, axis=-1).min(axis=-1)
    above = (np.cross(edges, to) * normal[:, None]).sum(axis=-1).min(axis=-1) >= 0
    height = np.abs((to[:, :, 0] * normal).sum(axis=-1))
    return np.where(above, height, beside).min(axis=1)
