//! The state of levels and queues, for the pages below `/debug/api_priority_and_fairness`.

use std::{collections::HashMap, sync::Arc};

use super::{ESTIMATE, Level, Levels, Noted, Queue};
use crate::flow_control::note::Note;

/// The state of a level.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::flow_control) struct LevelDigest {
    pub(in crate::flow_control) name: String,
    /// Whether the stored object is deleted, and requests of the level remain.
    pub(in crate::flow_control) is_retired: bool,
    pub(in crate::flow_control) waiting: usize,
    pub(in crate::flow_control) running: u64,
    /// The queues in their order. Empty for a level without queues.
    pub(in crate::flow_control) queues: Vec<QueueDigest>,
}

/// The state of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::flow_control) struct QueueDigest {
    pub(in crate::flow_control) waiting: usize,
    pub(in crate::flow_control) running: u64,
    /// Seats of the running requests.
    pub(in crate::flow_control) in_use: u64,
    /// Seats of the waiting requests.
    pub(in crate::flow_control) waiting_seats: u64,
    /// Expected seat time of the waiting requests, in microseconds.
    pub(in crate::flow_control) waiting_work: u64,
    /// Virtual time of the next request, in microseconds of seat time.
    pub(in crate::flow_control) virtual_start: u64,
}

/// A request that waits or runs.
#[derive(Clone, Debug)]
pub(in crate::flow_control) struct RequestDigest {
    pub(in crate::flow_control) level: String,
    /// The queue of the request. `None` if the level has no queues, or if the queue of a running request was removed.
    pub(in crate::flow_control) queue: Option<usize>,
    /// The place of the request in the queue. `None` if the request runs.
    pub(in crate::flow_control) place: Option<usize>,
    pub(in crate::flow_control) seats: u64,
    pub(in crate::flow_control) note: Arc<Note>,
}

impl Levels {
    /// The waiting and the running requests, in no order.
    pub(in crate::flow_control) fn requests(&self) -> Vec<RequestDigest> {
        let queues = self.levels.values().flat_map(|level| level.queues.iter().enumerate());
        let waiting = queues.flat_map(|(queue, one)| {
            one.waiting.iter().enumerate().map(move |(place, waiting)| (waiting.id, (queue, place)))
        });
        let places: HashMap<u64, (usize, usize)> = waiting.collect();
        let of = |noted: &Noted| {
            let level = self.levels.get(&noted.ticket.level)?;
            let place = places.get(&noted.ticket.id);
            let own = level.running_in.get(&noted.ticket.id).copied();
            Some(RequestDigest {
                level: level.config.name.clone(),
                queue: place.map(|(queue, _)| *queue).or(own),
                place: place.map(|(_, place)| *place),
                seats: noted.ticket.width,
                note: noted.note.clone(),
            })
        };
        self.notes.values().filter_map(of).collect()
    }

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
        in_use: queue.in_use,
        waiting_seats,
        waiting_work: waiting_seats.saturating_mul(ESTIMATE),
        virtual_start: queue.virtual_start,
    }
}
