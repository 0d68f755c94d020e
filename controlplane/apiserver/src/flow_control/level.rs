//! Priority levels: their limits, their queues, and the choice of the next request. No I/O and no clock.
//!
//! Each level has a nominal number of seats. The seats that are not lendable are reserved for the level. All other
//! seats form a pool from which each level can borrow up to its limit. Free seats go first to levels below their
//! nominal number. Upstream moves seats between levels every ten seconds instead.
//!
//! Within a level, the hash of a flow selects a hand of queues (shuffle sharding). A request waits in the shortest
//! queue of its hand. The next request comes from the queue whose requests have used the least seat time (start-time
//! fair queuing).

pub(super) mod digest;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::oneshot;

use super::note::Note;

/// Maximum number of waiting requests of all levels. Each waiting request keeps its headers in memory.
const MAX_WAITING: usize = 2000;
/// Maximum waiting requests of one level, as a multiple of the free slots of [`MAX_WAITING`]. So one level gets at most
/// three quarters of the slots. The other slots stay for other levels, such as those of nodes and controllers.
const PER_FREE_SLOT: usize = 3;
/// Assumed duration of a running request, in microseconds. At its end, the real duration is charged instead.
const ESTIMATE: u64 = 3000;

/// The configuration of a level.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LevelConfig {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) is_exempt: bool,
    shares: u64,
    lendable_percent: u64,
    /// Maximum borrowed seats in percent of the nominal number. `None` for no limit.
    borrowing_percent: Option<u64>,
    /// `None` rejects requests that get no seat immediately.
    queuing: Option<Queuing>,
}

/// The number of queues of a level, the number of queues of a flow, and the maximum number of requests in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Queuing {
    queues: usize,
    hand_size: usize,
    queue_length: usize,
}

/// The reason why a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rejection {
    QueueFull,
    ConcurrencyLimit,
    TimeOut,
}

/// Result of an admission.
#[derive(Debug)]
pub(crate) enum Admitted {
    Running,
    /// The receiver resolves when the request may run.
    Waiting(oneshot::Receiver<()>),
    Rejected(Rejection),
}

/// A request within a level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) level: u64,
    id: u64,
    /// Number of seats.
    pub(crate) width: u64,
    /// The queue at the admission. A new configuration can move a waiting request to another queue.
    queue: usize,
}

/// Counts of a level, for metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct LevelCounts {
    pub(crate) name: String,
    pub(crate) nominal: u64,
    /// Seats that no other level may use.
    pub(crate) reserved: u64,
    /// Maximum seats, including borrowed seats.
    pub(crate) limit: u64,
    #[cfg(test)]
    pub(crate) seats_in_use: u64,
    #[cfg(test)]
    pub(crate) running: u64,
    #[cfg(test)]
    pub(crate) waiting: u64,
}

/// All levels.
#[derive(Default)]
pub(crate) struct Levels {
    levels: HashMap<u64, Level>,
    ids: HashMap<String, u64>,
    next_id: u64,
    /// Seats that the levels share.
    seats: u64,
    /// Sum of the nominal seats of all levels. It can exceed `seats`, because each level rounds up.
    total: u64,
    /// Sum over the levels of the maximum of the seats in use and the reserved seats.
    committed: u64,
    waiting: usize,
    /// The waiting and the running requests, by the ids of their tickets.
    notes: HashMap<u64, Noted>,
}

/// A request with its ticket.
struct Noted {
    ticket: Ticket,
    note: Arc<Note>,
}

#[derive(Default)]
struct Level {
    config: LevelConfig,
    nominal: u64,
    /// Seats that no other level may use.
    reserved: u64,
    /// Maximum seats.
    limit: u64,
    in_use: u64,
    running: u64,
    queues: Vec<Queue>,
    /// The queues of the running requests, by the ids of their tickets. Without the requests of levels without queues,
    /// and those that run since before the last change of the number of queues: their queues do not exist any more.
    running_in: HashMap<u64, usize>,
    waiting: usize,
    /// Virtual start time of the last started request. An idle queue continues from this time.
    clock: u64,
    /// Whether the stored object is deleted. The level is removed after its last request.
    is_retired: bool,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// Virtual time of the next request: the seat time that the queue's requests have used.
    virtual_start: u64,
    running: u64,
    /// Seats of the running requests.
    in_use: u64,
}

struct Waiting {
    id: u64,
    width: u64,
    flow: u64,
    run: oneshot::Sender<()>,
}

// === impl LevelConfig ===

impl LevelConfig {
    /// Reads a stored PriorityLevelConfiguration.
    pub(crate) fn read(object: &Value) -> Self {
        let spec = &object["spec"];
        let is_exempt = spec["type"] == "Exempt";
        let limits = if is_exempt { &spec["exempt"] } else { &spec["limited"] };
        let response = &limits["limitResponse"];
        let queuing = &response["queuing"];
        let of = |field: &str, default: u64| {
            let number = queuing[field].as_u64().unwrap_or(default);
            usize::try_from(number).unwrap_or(usize::MAX)
        };
        // Validation accepts up to 10,000,000 queues, which would use too much memory.
        let queues = of("queues", 64).clamp(1, 1 << 14);
        let shape = Queuing {
            queues,
            hand_size: of("handSize", 8).clamp(1, queues),
            queue_length: of("queueLengthLimit", 50),
        };
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        Self {
            name: text("name"),
            uid: text("uid"),
            is_exempt,
            shares: limits["nominalConcurrencyShares"].as_u64().unwrap_or(if is_exempt { 0 } else { 30 }),
            lendable_percent: limits["lendablePercent"].as_u64().unwrap_or(0).min(100),
            borrowing_percent: limits["borrowingLimitPercent"].as_u64(),
            queuing: (!is_exempt && response["type"] == "Queue").then_some(shape),
        }
    }
}

// === impl Rejection ===

impl Rejection {
    /// The values in the order of the metrics counters.
    pub(crate) const ALL: [Self; 3] = [Self::QueueFull, Self::ConcurrencyLimit, Self::TimeOut];

    /// The reason in metrics, as upstream.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::QueueFull => "queue-full",
            Self::ConcurrencyLimit => "concurrency-limit",
            Self::TimeOut => "time-out",
        }
    }
}

// === impl Levels ===

impl Levels {
    /// Applies a new configuration. `seats` is the total of all limited levels. Running and waiting requests are kept.
    pub(crate) fn configure(&mut self, configs: Vec<LevelConfig>, seats: u64) {
        for level in self.levels.values_mut() {
            level.is_retired = true;
        }
        for config in configs {
            let id = *self.ids.entry(config.name.clone()).or_insert_with(|| {
                self.next_id += 1;
                self.next_id
            });
            let level = self.levels.entry(id).or_default();
            level.is_retired = false;
            level.reshape(config);
        }
        self.remove_ended();
        self.seats = seats;
        self.share();
        self.dispatch();
    }

    /// Distributes the seats to the levels.
    fn share(&mut self) {
        let shares: u64 = self.levels.values().map(|level| level.config.shares).sum();
        self.total = 0;
        for level in self.levels.values_mut() {
            level.nominal = (self.seats * level.config.shares).div_ceil(shares.max(1));
            self.total += level.nominal;
        }
        for level in self.levels.values_mut() {
            let lendable = (level.nominal * level.config.lendable_percent + 50) / 100;
            level.reserved = if level.config.is_exempt { 0 } else { level.nominal - lendable };
            let borrowed = level.config.borrowing_percent.map(|percent| level.nominal * percent / 100);
            level.limit = borrowed.map_or(self.total, |borrowed| level.nominal + borrowed).min(self.total);
        }
        self.committed = self.levels.values().map(Level::committed).sum();
    }

    /// The id of a level.
    pub(crate) fn id(&self, name: &str) -> Option<u64> {
        self.ids.get(name).copied()
    }

    /// Seats of a request that needs up to `wanted`. One request gets at most 15 % of a level, as upstream.
    pub(crate) fn width(&self, level: u64, wanted: u64) -> u64 {
        let nominal = self.levels.get(&level).map_or(0, |level| level.nominal);
        wanted.clamp(1, (nominal * 15 / 100).max(1))
    }

    /// Starts, queues or rejects a request.
    pub(crate) fn admit(&mut self, id: u64, width: u64, flow: u64) -> (Ticket, Admitted) {
        self.next_id += 1;
        let mut ticket = Ticket { level: id, id: self.next_id, width, queue: 0 };
        let free = MAX_WAITING.saturating_sub(self.waiting);
        let fits = self.fits(id, width);
        let Some(level) = self.levels.get_mut(&id) else { return (ticket, Admitted::Running) };
        let is_full = level.waiting >= free * PER_FREE_SLOT;
        let hand = level.hand(flow);
        if let Some(queue) = hand {
            ticket.queue = queue;
        }
        if level.config.is_exempt || (fits && level.waiting == 0) {
            self.start(&ticket);
            return (ticket, Admitted::Running);
        }
        let (Some(queue), Some(Queuing { queue_length, .. })) = (hand, level.config.queuing) else {
            return (ticket, Admitted::Rejected(Rejection::ConcurrencyLimit));
        };
        let Some(queue) =
            level.queues.get_mut(queue).filter(|queue| !is_full && queue.waiting.len() < queue_length)
        else {
            return (ticket, Admitted::Rejected(Rejection::QueueFull));
        };
        queue.rejoin(level.clock);
        let (run, admitted) = oneshot::channel();
        queue.waiting.push_back(Waiting { id: ticket.id, width, flow, run });
        level.waiting += 1;
        self.waiting += 1;
        // The queued request may already fit.
        self.dispatch();
        (ticket, Admitted::Waiting(admitted))
    }

    /// Keeps a description of an admitted request until its end.
    pub(crate) fn note(&mut self, ticket: Ticket, note: Arc<Note>) {
        self.notes.insert(ticket.id, Noted { ticket, note });
    }

    /// Ends a waiting or running request. `used` is its duration in microseconds.
    pub(crate) fn end(&mut self, ticket: &Ticket, used: u64) {
        self.notes.remove(&ticket.id);
        let Some(level) = self.levels.get_mut(&ticket.level) else { return };
        let before = level.committed();
        if level.remove_waiting(ticket.id) {
            self.waiting -= 1;
        } else {
            level.in_use = level.in_use.saturating_sub(ticket.width);
            level.running = level.running.saturating_sub(1);
            let queue = level.running_in.remove(&ticket.id);
            if let Some(queue) = queue.and_then(|queue| level.queues.get_mut(queue)) {
                queue.running = queue.running.saturating_sub(1);
                queue.in_use = queue.in_use.saturating_sub(ticket.width);
                let cost = ticket.width.saturating_mul(used);
                queue.virtual_start =
                    queue.virtual_start.saturating_add(cost).saturating_sub(ticket.width * ESTIMATE);
            }
        }
        self.committed = self.committed - before + level.committed();
        if level.is_retired {
            self.remove_ended();
            // The level may be removed: distribute its seats to the other levels.
            self.share();
        }
        self.dispatch();
    }

    pub(crate) fn counts(&self) -> Vec<LevelCounts> {
        let of = |level: &Level| LevelCounts {
            name: level.config.name.clone(),
            nominal: level.nominal,
            reserved: level.reserved,
            limit: level.limit,
            #[cfg(test)]
            seats_in_use: level.in_use,
            #[cfg(test)]
            running: level.running,
            #[cfg(test)]
            waiting: u64::try_from(level.waiting).unwrap_or(u64::MAX),
        };
        self.levels.values().map(of).collect()
    }

    /// Starts waiting requests while seats are free.
    fn dispatch(&mut self) {
        while self.waiting > 0 {
            // Levels with the lowest ratio of used to nominal seats come first.
            let best = self
                .levels
                .iter()
                .filter_map(|(id, level)| Some((*id, level, level.next_queue()?)))
                .filter(|(id, level, queue)| self.fits(*id, level.head_width(*queue)))
                .min_by_key(|(id, level, _)| (level.in_use * 1000 / level.nominal.max(1), *id))
                .map(|(id, _, queue)| (id, queue));
            let Some((id, queue)) = best else { return };
            let Some(level) = self.levels.get_mut(&id) else { return };
            let Some(waiting) = level.queues.get_mut(queue).and_then(|queue| queue.waiting.pop_front())
            else {
                return;
            };
            level.waiting -= 1;
            self.waiting -= 1;
            self.start(&Ticket { level: id, id: waiting.id, width: waiting.width, queue });
            // If the request was cancelled, its receiver was dropped. Its ticket is ended when its `Seats` are dropped.
            let _ = waiting.run.send(());
        }
    }

    fn start(&mut self, ticket: &Ticket) {
        let Some(level) = self.levels.get_mut(&ticket.level) else { return };
        let before = level.committed();
        level.in_use += ticket.width;
        level.running += 1;
        self.committed = self.committed - before + level.committed();
        let clock = level.clock;
        if let Some(queue) = level.queues.get_mut(ticket.queue) {
            queue.rejoin(clock);
            level.clock = clock.max(queue.virtual_start);
            queue.virtual_start = queue.virtual_start.saturating_add(ticket.width * ESTIMATE);
            queue.running += 1;
            queue.in_use += ticket.width;
            level.running_in.insert(ticket.id, ticket.queue);
        }
    }

    /// Whether a level may use `width` more seats now.
    fn fits(&self, id: u64, width: u64) -> bool {
        self.levels.get(&id).is_some_and(|level| {
            let in_use = level.in_use + width;
            let committed = self.committed - level.committed() + in_use.max(level.reserved);
            in_use <= level.limit && (in_use <= level.reserved || committed <= self.total)
        })
    }

    fn remove_ended(&mut self) {
        self.levels.retain(|_, level| !level.is_retired || level.running > 0 || level.waiting > 0);
        self.ids.retain(|_, id| self.levels.contains_key(id));
    }
}

// === impl Level ===

impl Level {
    /// Applies a configuration. Waiting requests are distributed to the new queues. Running requests do not count in
    /// the new queues.
    fn reshape(&mut self, config: LevelConfig) {
        let count = config.queuing.map_or(0, |queuing| queuing.queues);
        self.config = config;
        if count == self.queues.len() {
            return;
        }
        let former = std::mem::take(&mut self.queues);
        self.running_in.clear();
        // Requests that already wait need a queue even if the new configuration has no queues.
        let count = if count == 0 && self.waiting > 0 { 1 } else { count };
        self.queues.resize_with(count, Queue::default);
        self.clock = 0;
        for waiting in former.into_iter().flat_map(|queue| queue.waiting) {
            let queue = self.hand(waiting.flow).unwrap_or(0);
            if let Some(queue) = self.queues.get_mut(queue) {
                queue.waiting.push_back(waiting);
            }
        }
    }

    /// The seats that other levels cannot use.
    fn committed(&self) -> u64 {
        if self.config.is_exempt { 0 } else { self.in_use.max(self.reserved) }
    }

    /// The shortest queue of the flow's hand. The hand has no duplicates.
    fn hand(&self, flow: u64) -> Option<usize> {
        let size = self.config.queuing?.hand_size;
        let count = self.queues.len();
        let mut hand: Vec<usize> = Vec::with_capacity(size);
        let (mut rest, mut left) = (flow, u64::try_from(count).unwrap_or(1).max(1));
        while hand.len() < size.min(count) {
            let mut card = usize::try_from(rest % left).unwrap_or(0);
            rest /= left;
            left -= 1;
            // `card` is an index into the queues that are not in the hand.
            hand.sort_unstable();
            for taken in &hand {
                if *taken <= card {
                    card += 1;
                }
            }
            hand.push(card);
        }
        let load = |queue: &usize| {
            let queue = self.queues.get(*queue);
            queue.map_or(0, |queue| queue.waiting.len() as u64 + queue.running)
        };
        hand.into_iter().min_by_key(load)
    }

    /// The queue with the next request.
    fn next_queue(&self) -> Option<usize> {
        if self.waiting == 0 {
            return None;
        }
        let waiting = self.queues.iter().enumerate().filter(|(_, queue)| !queue.waiting.is_empty());
        waiting.min_by_key(|(_, queue)| queue.virtual_start).map(|(at, _)| at)
    }

    fn head_width(&self, queue: usize) -> u64 {
        self.queues.get(queue).and_then(|queue| queue.waiting.front()).map_or(0, |head| head.width)
    }

    fn remove_waiting(&mut self, id: u64) -> bool {
        if self.waiting == 0 {
            return false;
        }
        for queue in &mut self.queues {
            if let Some(at) = queue.waiting.iter().position(|waiting| waiting.id == id) {
                queue.waiting.remove(at);
                self.waiting -= 1;
                return true;
            }
        }
        false
    }
}

// === impl Queue ===

impl Queue {
    /// Sets an empty queue to the level's virtual time, so that idle time gives a queue no advantage over busy queues.
    fn rejoin(&mut self, clock: u64) {
        if self.waiting.is_empty() && self.running == 0 {
            self.virtual_start = self.virtual_start.max(clock);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn limited(name: &str, shares: u64, lendable: u64, queuing: Value) -> LevelConfig {
        let response = match queuing {
            Value::Null => json!({"type": "Reject"}),
            queuing => json!({"type": "Queue", "queuing": queuing}),
        };
        LevelConfig::read(&json!({"metadata": {"name": name}, "spec": {"type": "Limited", "limited": {
            "nominalConcurrencyShares": shares, "lendablePercent": lendable, "limitResponse": response}}}))
    }

    fn levels(configs: Vec<LevelConfig>, seats: u64) -> Levels {
        let mut levels = Levels::default();
        levels.configure(configs, seats);
        levels
    }

    /// Adds requests of one flow until one is queued or rejected.
    fn fill(levels: &mut Levels, name: &str, flow: u64) -> Vec<Ticket> {
        let id = levels.id(name).unwrap();
        let mut running = Vec::new();
        loop {
            match levels.admit(id, 1, flow) {
                (ticket, Admitted::Running) => running.push(ticket),
                (ticket, Admitted::Waiting(_)) => {
                    levels.end(&ticket, 0);
                    return running;
                }
                (_, Admitted::Rejected(_)) => return running,
            }
        }
    }

    fn wait(levels: &mut Levels, name: &str, flow: u64) -> (Ticket, oneshot::Receiver<()>) {
        let id = levels.id(name).unwrap();
        match levels.admit(id, 1, flow) {
            (ticket, Admitted::Waiting(receiver)) => (ticket, receiver),
            (_, other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_level_lends_only_its_lendable_seats_and_gets_them_back_first() {
        let queue = || json!({"queues": 4, "handSize": 1, "queueLengthLimit": 9});
        let mut levels = levels(vec![limited("a", 1, 50, queue()), limited("b", 1, 0, queue())], 20);
        // Level b gets its 10 nominal seats and borrows the 5 lendable seats of a.
        let busy = fill(&mut levels, "b", 0);
        assert_eq!(busy.len(), 15);
        let own = fill(&mut levels, "a", 0);
        assert_eq!(own.len(), 5);
        let (_, mut of_b) = wait(&mut levels, "b", 0);
        let (_, mut of_a) = wait(&mut levels, "a", 0);
        levels.end(&busy[0], 1000);
        assert!(of_a.try_recv().is_ok(), "a is below its nominal number");
        assert!(of_b.try_recv().is_err());
        levels.end(&busy[1], 1000);
        assert!(of_b.try_recv().is_ok());
    }

    #[test]
    fn a_flow_that_floods_does_not_starve_another() {
        let queue = json!({"queues": 8, "handSize": 1, "queueLengthLimit": 50});
        let mut levels = levels(vec![limited("a", 1, 0, queue)], 1);
        let id = levels.id("a").unwrap();
        let (first, running) = levels.admit(id, 1, 0);
        assert!(matches!(running, Admitted::Running));
        let flood: Vec<_> = (0..50).map(|_| wait(&mut levels, "a", 0)).collect();
        let (_, full) = levels.admit(id, 1, 0);
        assert!(matches!(full, Admitted::Rejected(Rejection::QueueFull)));
        let (_, mut other) = wait(&mut levels, "a", 1);
        // Two requests end: at most one request of the flow with many requests may start before the other flow.
        levels.end(&first, 1000);
        levels.end(&flood[0].0, 1000);
        assert!(other.try_recv().is_ok());
    }

    #[test]
    fn hands_have_distinct_queues_and_flows_differ() {
        let queue = json!({"queues": 64, "handSize": 8, "queueLengthLimit": 50});
        let levels = levels(vec![limited("a", 1, 0, queue)], 10);
        let level = levels.levels.values().next().unwrap();
        let all: std::collections::HashSet<_> =
            (0..1000u64).filter_map(|flow| level.hand(flow.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
        assert!(all.len() > 30, "{}", all.len());
        assert!(all.iter().all(|queue| *queue < 64));
    }

    #[test]
    fn a_level_without_queues_rejects_and_a_deleted_one_drains() {
        let mut levels = levels(vec![limited("a", 1, 0, Value::Null)], 3);
        let busy = fill(&mut levels, "a", 0);
        assert_eq!(busy.len(), 3);
        let id = levels.id("a").unwrap();
        assert!(matches!(levels.admit(id, 1, 0).1, Admitted::Rejected(Rejection::ConcurrencyLimit)));
        levels.configure(Vec::new(), 3);
        assert_eq!(levels.counts()[0].running, 3);
        busy.iter().for_each(|ticket| levels.end(ticket, 1));
        assert!(levels.counts().is_empty());
    }

    #[test]
    fn the_seats_of_an_ended_level_belong_to_the_others() {
        let level = |name: &str| limited(name, 1, 0, Value::Null);
        let mut levels = levels(vec![level("a"), level("b")], 10);
        let busy = fill(&mut levels, "a", 0);
        assert_eq!(busy.len(), 5);
        levels.configure(vec![level("b")], 10);
        assert_eq!(fill(&mut levels, "b", 0).len(), 5);
        busy.iter().for_each(|ticket| levels.end(ticket, 1));
        assert_eq!((levels.counts()[0].nominal, fill(&mut levels, "b", 0).len()), (10, 5));
    }

    #[test]
    fn waiting_requests_survive_a_change_of_the_queues() {
        let queue = |queues: u64| json!({"queues": queues, "handSize": 1, "queueLengthLimit": 50});
        let mut levels = levels(vec![limited("a", 1, 0, queue(8))], 1);
        let busy = fill(&mut levels, "a", 0);
        let mut waiting: Vec<_> = (0..5).map(|flow| wait(&mut levels, "a", flow)).collect();
        let (cancelled, _) = waiting.remove(0);
        levels.end(&cancelled, 0);
        levels.configure(vec![limited("a", 1, 0, queue(3))], 1);
        levels.end(&busy[0], 1);
        let mut done = 0;
        while let Some(at) = waiting.iter_mut().position(|(_, run)| run.try_recv().is_ok()) {
            levels.end(&waiting.remove(at).0, 1);
            done += 1;
        }
        assert_eq!((done, levels.waiting, levels.counts()[0].running), (4, 0, 0));
        assert_eq!(levels.committed, 1);
    }

    #[test]
    fn the_counts_of_queues_are_exact_after_a_change_of_their_number() {
        let queue = |queues: u64| json!({"queues": queues, "handSize": 1, "queueLengthLimit": 50});
        let counts = |levels: &Levels| -> Vec<(u64, u64)> {
            levels.digest()[0].queues.iter().map(|queue| (queue.running, queue.in_use)).collect()
        };
        let mut levels = levels(vec![limited("a", 1, 0, queue(4))], 2);
        let former = fill(&mut levels, "a", 3);
        assert_eq!(counts(&levels), [(0, 0), (0, 0), (0, 0), (2, 2)]);
        // The hand of flow 3 is queue 3 of 4, and then queue 1 of 2.
        let waiting: Vec<_> = (0..2).map(|_| wait(&mut levels, "a", 3).0).collect();
        levels.configure(vec![limited("a", 1, 0, queue(2))], 2);
        assert_eq!(counts(&levels), [(0, 0), (0, 0)], "the queue of the running requests is gone");
        former.iter().for_each(|ticket| levels.end(ticket, 1000));
        assert_eq!(counts(&levels), [(0, 0), (2, 2)], "the moved requests run");
        let (new, _) = wait(&mut levels, "a", 1);
        levels.end(&waiting[0], 1000);
        assert_eq!(counts(&levels), [(0, 0), (2, 2)]);
        levels.end(&waiting[1], 1000);
        levels.end(&new, 1000);
        assert_eq!(counts(&levels), [(0, 0), (0, 0)]);
        assert!(levels.levels.values().all(|level| level.running_in.is_empty() && level.in_use == 0));
    }

    #[test]
    fn all_waiting_requests_are_bounded() {
        let queue = || json!({"queues": 1000, "handSize": 1, "queueLengthLimit": 50});
        let mut levels = levels(vec![limited("a", 1, 0, queue()), limited("b", 1, 0, queue())], 2);
        let _busy = [fill(&mut levels, "a", 0), fill(&mut levels, "b", 0)];
        let most = (MAX_WAITING * 3 / 4) as u64;
        let held: Vec<_> = (0..most).map(|flow| wait(&mut levels, "a", flow)).collect();
        let [a, b] = ["a", "b"].map(|name| levels.id(name).unwrap());
        assert!(matches!(levels.admit(a, 1, 7777).1, Admitted::Rejected(Rejection::QueueFull)));
        assert_eq!(held.len() as u64, most);
        let waits = matches!(levels.admit(b, 1, 7777).1, Admitted::Waiting(_));
        assert!(waits, "a flood in one level leaves room in another");
    }
}
