//! PageRank and betweenness centrality of a generated power-law graph, with one thread.
//!
//! The graph has the form of the Twitter graph that OneSidedMW uses: few vertices have most edges.
//! The number of a vertex says nothing of its degree, so that hot pages lie anywhere.

use units::Random;

use super::Measured;
use super::workload::{fold, timed, unit};

/// Mean out-degree of a vertex.
const DEGREE: usize = 16;
/// A prime larger than the number of vertices, which scatters the ranks of vertices.
const SCATTER: u64 = 2_654_435_761;
/// Vertices of the largest graph.
const VERTICES_MAX: usize = 1 << 31;

/// A directed graph as rows of out-edges, one after another.
struct Graph {
    /// Begin of the row of each vertex, and the end of the last row.
    rows: Vec<u32>,
    targets: Vec<u32>,
}

impl Graph {
    /// The edges of a vertex.
    fn row(&self, vertex: usize) -> &[u32] {
        &self.targets[self.rows[vertex] as usize..self.rows[vertex + 1] as usize]
    }

    fn vertices(&self) -> usize {
        self.rows.len() - 1
    }

    /// Generates a graph whose in-degrees and out-degrees have a power law with exponent 2.5.
    /// Calls `edge` with the target of each edge.
    fn generate(vertices: usize, mut edge: impl FnMut(usize)) -> Self {
        let mut random = Random::stream(0x6772, 0);
        let edges = DEGREE * vertices;
        let mut rows = Vec::with_capacity(vertices + 1);
        let mut targets = Vec::with_capacity(edges);
        rows.push(0);
        for _ in 0..vertices {
            // The mean of u^(-2/3) is 3.
            let degree = (DEGREE as f64 / 3.0) * (1.0 - unit(&mut random)).powf(-2.0 / 3.0);
            let degree = (degree.round() as usize).min(edges - targets.len()).min(vertices);
            for _ in 0..degree {
                let u = unit(&mut random);
                let rank = (u * u * u * vertices as f64) as u64;
                let target = (rank * SCATTER % vertices as u64) as usize;
                edge(target);
                targets.push(target as u32);
            }
            rows.push(targets.len() as u32);
        }
        Self { rows, targets }
    }
}

/// Vertices of a graph if the program has `bytes` of data, of which `arrays` for each vertex beside
/// the graph.
fn vertices(bytes: usize, arrays: usize) -> usize {
    let each = size_of::<u32>() * (1 + DEGREE) + arrays;
    (bytes / each).clamp(2, VERTICES_MAX / DEGREE)
}

const PAGE_RANK_ROUNDS: usize = 5;
const DAMPING: f64 = 0.85;

/// PageRank: each vertex pulls the rank of those in its row, as in GAPBS.
pub fn page_rank(bytes: usize) -> Measured {
    let n = vertices(bytes, 2 * size_of::<f64>() + size_of::<u32>());
    let mut degrees = vec![0u32; n];
    let graph = Graph::generate(n, |source| degrees[source] += 1);
    let mut ranks = Vec::new();
    let (seconds, cpu_seconds) = timed(|| ranks = ranked(&graph, &degrees));
    let checksum = fold(ranks.iter().map(|rank| rank.to_bits()));
    Measured { seconds, cpu_seconds, whole_seconds: 0.0, checksum }
}

/// The ranks after some rounds. `degrees`: the number of rows in which each vertex is.
fn ranked(graph: &Graph, degrees: &[u32]) -> Vec<f64> {
    let n = graph.vertices();
    let mut ranks = vec![1.0 / n as f64; n];
    let mut shares = vec![0.0; n];
    for _ in 0..PAGE_RANK_ROUNDS {
        for (share, (rank, degree)) in shares.iter_mut().zip(ranks.iter().zip(degrees)) {
            *share = rank / f64::from((*degree).max(1));
        }
        for (vertex, rank) in ranks.iter_mut().enumerate() {
            let sum: f64 = graph.row(vertex).iter().map(|source| shares[*source as usize]).sum();
            *rank = (1.0 - DAMPING) / n as f64 + DAMPING * sum;
        }
    }
    ranks
}

/// Sources of shortest paths. The exact centrality has all vertices as sources.
const SOURCES: usize = 2;
/// Depth of a vertex that the search has not reached.
const UNREACHED: u32 = u32::MAX;

/// Betweenness centrality by Brandes' algorithm, from some sources.
pub fn betweenness(bytes: usize) -> Measured {
    let n = vertices(bytes, 3 * size_of::<f64>() + size_of::<u32>());
    let graph = Graph::generate(n, |_| {});
    let mut scores = Vec::new();
    let (seconds, cpu_seconds) = timed(|| {
        let sources = (0..n).filter(|vertex| !graph.row(*vertex).is_empty()).take(SOURCES);
        scores = centrality(&graph, sources);
    });
    let checksum = fold(scores.iter().map(|score| score.to_bits()));
    Measured { seconds, cpu_seconds, whole_seconds: 0.0, checksum }
}

/// The centrality of each vertex on the shortest paths from `sources`. Edges that are there twice
/// are two paths.
fn centrality(graph: &Graph, sources: impl Iterator<Item = usize>) -> Vec<f64> {
    let n = graph.vertices();
    let mut scores = vec![0.0; n];
    let (mut depths, mut paths) = (vec![UNREACHED; n], vec![0.0; n]);
    let mut dependencies = vec![0.0; n];
    for source in sources {
        depths.fill(UNREACHED);
        paths.fill(0.0);
        dependencies.fill(0.0);
        (depths[source], paths[source]) = (0, 1.0);
        let last = search(graph, &mut depths, &mut paths);
        for depth in (0..last).rev() {
            for vertex in 0..n {
                if depths[vertex] != depth {
                    continue;
                }
                let below = graph.row(vertex).iter().map(|target| *target as usize);
                let below = below.filter(|target| depths[*target] == depth + 1);
                let parts = below.map(|t| paths[vertex] / paths[t] * (1.0 + dependencies[t]));
                dependencies[vertex] = parts.sum();
                if vertex != source {
                    scores[vertex] += dependencies[vertex];
                }
            }
        }
    }
    scores
}

/// Breadth-first search, level by level in the order of the vertices. Returns the depth of the last
/// level.
fn search(graph: &Graph, depths: &mut [u32], paths: &mut [f64]) -> u32 {
    for depth in 0.. {
        let mut is_last = true;
        for vertex in 0..depths.len() {
            if depths[vertex] != depth {
                continue;
            }
            for target in graph.row(vertex).iter().map(|target| *target as usize) {
                if depths[target] == UNREACHED {
                    depths[target] = depth + 1;
                    is_last = false;
                }
                if depths[target] == depth + 1 {
                    paths[target] += paths[vertex];
                }
            }
        }
        if is_last {
            return depth;
        }
    }
    unreachable!("a path has fewer edges than there are vertices")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(rows: &[&[u32]]) -> Graph {
        let mut graph = Graph { rows: vec![0], targets: Vec::new() };
        for row in rows {
            graph.targets.extend_from_slice(row);
            graph.rows.push(graph.targets.len() as u32);
        }
        graph
    }

    #[test]
    fn few_vertices_have_most_edges() {
        let n = 10_000;
        let mut degrees = vec![0u32; n];
        let graph = Graph::generate(n, |target| degrees[target] += 1);
        let edges = graph.targets.len();
        assert!((DEGREE * n * 8 / 10..=DEGREE * n).contains(&edges), "{edges}");
        let mut rows: Vec<usize> = (0..n).map(|vertex| graph.row(vertex).len()).collect();
        let mut ins: Vec<usize> = degrees.iter().map(|degree| *degree as usize).collect();
        for degrees in [&mut rows, &mut ins] {
            assert_eq!(degrees.iter().sum::<usize>(), edges);
            degrees.sort_unstable_by(|a, b| b.cmp(a));
            let most: usize = degrees[..n / 10].iter().sum();
            assert!(most * 5 > edges * 2, "a tenth of the vertices has {most} of {edges}");
            assert!(degrees[0] > 30 * DEGREE, "{}", degrees[0]);
        }
    }

    #[test]
    fn ranks_of_a_ring_are_equal_and_a_hub_has_the_most() {
        let ring = graph(&[&[2], &[0], &[1]]);
        for rank in ranked(&ring, &[1, 1, 1]) {
            assert!((rank - 1.0 / 3.0).abs() < 1e-12);
        }
        // All point to vertex 0, which points to vertex 1.
        let hub = graph(&[&[1, 2], &[0], &[]]);
        let ranks = ranked(&hub, &[1, 1, 1]);
        assert!(ranks[0] > ranks[1] && ranks[1] > ranks[2], "{ranks:?}");
    }

    /// The centrality by the number of shortest paths between all pairs.
    fn by_pairs(graph: &Graph) -> Vec<f64> {
        let n = graph.vertices();
        let searched: Vec<_> = (0..n)
            .map(|source| {
                let (mut depths, mut paths) = (vec![UNREACHED; n], vec![0.0; n]);
                (depths[source], paths[source]) = (0, 1.0);
                search(graph, &mut depths, &mut paths);
                (depths, paths)
            })
            .collect();
        let mut scores = vec![0.0; n];
        for (source, (depths, paths)) in searched.iter().enumerate() {
            for target in (0..n).filter(|t| *t != source && depths[*t] != UNREACHED) {
                for vertex in (0..n).filter(|v| *v != source && *v != target) {
                    let (second, more) = &searched[vertex];
                    let is_between = depths[vertex] != UNREACHED
                        && second[target] != UNREACHED
                        && depths[vertex] + second[target] == depths[target];
                    if is_between {
                        scores[vertex] += paths[vertex] * more[target] / paths[target];
                    }
                }
            }
        }
        scores
    }

    #[test]
    fn centrality_of_all_sources_is_that_of_all_pairs() {
        let path = graph(&[&[1], &[2], &[3], &[]]);
        assert_eq!(centrality(&path, 0..4), [0.0, 2.0, 2.0, 0.0]);
        let random = Graph::generate(60, |_| {});
        let (ours, expected) = (centrality(&random, 0..60), by_pairs(&random));
        assert!(expected.iter().any(|score| *score > 10.0), "{expected:?}");
        for (ours, expected) in ours.iter().zip(&expected) {
            assert!((ours - expected).abs() < 1e-9, "{ours} {expected}");
        }
    }
}
