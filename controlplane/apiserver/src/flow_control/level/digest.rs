//! The state of levels and queues, for the pages below `/debug/api_priority_and_fairness`.

use super::{ESTIMATE, Level, Levels, Queue};

/// The state of a level.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::flow_control) struct LevelDigest {
    pub(in crate::flow_control) name: String,
    /// Whether the stored object is deleted, and requests of the level remain.
    pub(in crate::flow_control) is_retired: bool,
    pub(in crate::flow_control) waiting: usize,
    pub(in crate::flow_control) running: u64,
    /// The queues in their order. A level without queues has none.
    pub(in crate::flow_control) queues: Vec<QueueDigest>,
}

/// The state of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::flow_control) struct QueueDigest {
    pub(in crate::flow_control) waiting: usize,
    pub(in crate::flow_control) running: u64,
    /// Seats of the waiting requests.
    pub(in crate::flow_control) waiting_seats: u64,
    /// Expected seat time of the waiting requests, in microseconds.
    pub(in crate::flow_control) waiting_work: u64,
    /// Virtual time of the next request, in microseconds of seat time.
    pub(in crate::flow_control) virtual_start: u64,
}

impl Levels {
    /// The state of all levels, by name.
    pub(in crate::flow_control) fn digest(&self) -> Vec<LevelDigest> {
        let mut all: Vec<LevelDigest> = self.levels.values().map(of_level).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

fn of_level(level: &Level) -> LevelDigest {
    LevelDigest {
        name: level.config.name.clone(),
        is_retired: level.is_retired,
        waiting: level.waiting,
        running: level.running,
        queues: level.queues.iter().map(of_queue).collect(),
    }
}

fn of_queue(queue: &Queue) -> QueueDigest {
    let waiting_seats = queue.waiting.iter().map(|one| one.width).sum();
    QueueDigest {
        waiting: queue.waiting.len(),
        running: queue.running,
        waiting_seats,
        waiting_work: waiting_seats.saturating_mul(ESTIMATE),
        virtual_start: queue.virtual_start,
    }
}
