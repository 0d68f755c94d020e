//! The pages `dump_priority_levels`, `dump_queues` and `dump_requests` below `/debug/api_priority_and_fairness`, as
//! tables. Source: `apf_controller_debug.go` of `k8s.io/apiserver/pkg/util/flowcontrol`.

use super::counts::SchemaCounts;
use super::level::Rejection;
use super::level::digest::{LevelDigest, RequestDigest};

const LEVELS: [&str; 10] = [
    "PriorityLevelName",
    "ActiveQueues",
    "IsIdle",
    "IsQuiescing",
    "WaitingRequests",
    "ExecutingRequests",
    "DispatchedRequests",
    "RejectedRequests",
    "TimedoutRequests",
    "CancelledRequests",
];
const QUEUES: [&str; 9] = [
    "PriorityLevelName",
    "Index",
    "PendingRequests",
    "ExecutingRequests",
    "SeatsInUse",
    "NextDispatchR",
    "InitialSeatsSum",
    "MaxSeatsSum",
    "TotalWorkSum",
];

/// The spelling of `FlowDistingsher` is upstream's.
const REQUESTS: [&str; 10] = [
    "PriorityLevelName",
    "FlowSchemaName",
    "QueueIndex",
    "RequestIndexInQueue",
    "FlowDistingsher",
    "ArriveTime",
    "InitialSeats",
    "FinalSeats",
    "AdditionalLatency",
    "StartTime",
];
/// Columns of the details of requests.
const DETAILS: [&str; 8] =
    ["UserName", "Verb", "APIPath", "Namespace", "Name", "APIVersion", "Resource", "SubResource"];
/// The start time of a request that waits, as upstream.
const NOT_STARTED: &str = "0001-01-01T00:00:00Z";
/// Maximum characters of a value that a client chooses.
const MAX_VALUE: usize = 256;

/// A row for each level.
pub(super) fn priority_levels(levels: &[LevelDigest], schemas: &[SchemaCounts]) -> String {
    let row = |level: &LevelDigest| {
        let own = || schemas.iter().filter(move |schema| schema.level == level.name);
        let rejected = |is_timeout: bool| {
            let all = own().flat_map(|schema| schema.rejected);
            let counted = all.filter(|(why, _)| (*why == Rejection::TimeOut.name()) == is_timeout);
            counted.map(|(_, count)| count).sum::<u64>()
        };
        let active = level.queues.iter().filter(|queue| queue.waiting > 0).count();
        let is_idle = level.waiting == 0 && level.running == 0;
        [
            level.name.clone(),
            active.to_string(),
            is_idle.to_string(),
            level.is_retired.to_string(),
            level.waiting.to_string(),
            level.running.to_string(),
            own().map(|schema| schema.dispatched).sum::<u64>().to_string(),
            rejected(false).to_string(),
            rejected(true).to_string(),
            // Requests whose clients disconnect while they wait are not counted.
            "0".to_owned(),
        ]
    };
    table(&LEVELS, levels.iter().map(|level| Vec::from(row(level))).collect())
}

/// A row for each queue of each level.
pub(super) fn queues(levels: &[LevelDigest]) -> String {
    let rows = levels.iter().flat_map(|level| {
        level.queues.iter().enumerate().map(|(index, queue)| {
            let seats = queue.waiting_seats.to_string();
            Vec::from([
                level.name.clone(),
                index.to_string(),
                queue.waiting.to_string(),
                queue.running.to_string(),
                queue.in_use.to_string(),
                seat_seconds(queue.virtual_start),
                seats.clone(),
                seats,
                seat_seconds(queue.waiting_work),
            ])
        })
    });
    table(&QUEUES, rows.collect())
}

/// A row for each request that waits or runs. The rows are sorted by level and queue. In each queue, the waiting
/// requests come first, in their order, and then the running requests.
pub(super) fn requests(mut requests: Vec<RequestDigest>, has_details: bool) -> String {
    requests.sort_by(|a, b| {
        let key = |one: &RequestDigest| (one.queue.unwrap_or(usize::MAX), one.place.unwrap_or(usize::MAX));
        let by_time = || a.note.arrived.cmp(&b.note.arrived);
        a.level.cmp(&b.level).then_with(|| key(a).cmp(&key(b))).then_with(by_time)
    });
    let row = |one: &RequestDigest| {
        let started = one.note.started.get();
        let mut row = Vec::from([
            one.level.clone(),
            one.note.schema.clone(),
            index(one.queue),
            index(one.place),
            value(&one.note.flow),
            one.note.arrived.to_string(),
            one.seats.to_string(),
            // A request needs no more seats after its response.
            "0".to_owned(),
            "0s".to_owned(),
            started.map_or_else(|| NOT_STARTED.to_owned(), ToString::to_string),
        ]);
        if has_details {
            row.extend(details(one));
        }
        row
    };
    let rows = requests.iter().map(row).collect();
    match has_details {
        true => table(&[&REQUESTS[..], &DETAILS[..]].concat(), rows),
        false => table(&REQUESTS, rows),
    }
}

fn details(one: &RequestDigest) -> [String; 8] {
    let resource = one.note.resource().unwrap_or_default();
    let version = match resource.group.as_str() {
        "" => resource.version,
        group => format!("{group}/{}", resource.version),
    };
    [
        value(&one.note.user),
        one.note.verb.to_owned(),
        value(&one.note.path),
        value(&resource.namespace),
        value(&resource.name),
        value(&version),
        value(&resource.resource),
        value(&resource.subresource),
    ]
}

/// An index; -1 if there is no index.
fn index(index: Option<usize>) -> String {
    index.map_or_else(|| "-1".to_owned(), |index| index.to_string())
}

/// A value that a client chooses. It must not look like further cells or rows.
fn value(text: &str) -> String {
    let is_special = |one: char| one.is_control() || one == ',';
    text.chars().take(MAX_VALUE).map(|one| if is_special(one) { '?' } else { one }).collect()
}

/// An amount of seat time, in the format of upstream.
fn seat_seconds(micros: u64) -> String {
    format!("{}.{:06}00ss", micros / 1_000_000, micros % 1_000_000)
}

/// Columns of equal width. Each cell except the last cell of a row ends with a comma.
fn table(header: &[&str], mut rows: Vec<Vec<String>>) -> String {
    rows.insert(0, header.iter().map(|&name| name.to_owned()).collect());
    let mut widths = vec![0; header.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let cell = format!("{cell},");
            line.push_str(&format!("{cell:<width$} ", width = width + 1));
        }
        text.push_str(line.trim_end().trim_end_matches(','));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::level::digest::QueueDigest;
    use super::super::note::Note;
    use super::*;

    #[test]
    fn levels_and_queues_are_rows_of_tables() {
        let busy = QueueDigest {
            waiting: 2,
            running: 1,
            in_use: 4,
            waiting_seats: 3,
            waiting_work: 9000,
            virtual_start: 77_643_420,
        };
        let levels = [
            LevelDigest { name: "exempt".to_owned(), ..LevelDigest::default() },
            LevelDigest {
                name: "low".to_owned(),
                is_retired: true,
                waiting: 2,
                running: 1,
                queues: vec![QueueDigest::default(), busy],
            },
        ];
        let schema = SchemaCounts {
            schema: "s".to_owned(),
            level: "low".to_owned(),
            dispatched: 7,
            rejected: [("queue-full", 1), ("concurrency-limit", 2), ("time-out", 4)],
            waiting: [2, 3],
            executing: [1, 1],
        };
        let text = priority_levels(&levels, &[schema]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with("PriorityLevelName, ActiveQueues, IsIdle, IsQuiescing, WaitingRequests, ")
        );
        assert!(lines[1].starts_with("exempt,            0,            true,   false,       0, "), "{text}");
        let row = |line: &str| line.split(',').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
        assert_eq!(row(lines[2]), ["low", "1", "false", "true", "2", "1", "7", "3", "4", "0"]);
        let text = queues(&levels);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(row(lines[2]), ["low", "1", "2", "1", "4", "77.64342000ss", "3", "3", "0.00900000ss"]);
    }

    fn request(place: Option<usize>, user: &str) -> RequestDigest {
        let note = Note {
            schema: "s".to_owned(),
            flow: user.to_owned(),
            user: user.to_owned(),
            verb: "list",
            path: "/apis/apps/v1/namespaces/n/deployments/d/status".to_owned(),
            arrived: jiff::Timestamp::UNIX_EPOCH,
            started: std::sync::OnceLock::new(),
        };
        if place.is_none() {
            note.start();
        }
        RequestDigest {
            level: "low".to_owned(),
            queue: Some(3),
            place,
            seats: 2,
            note: std::sync::Arc::new(note),
        }
    }

    #[test]
    fn requests_are_rows_in_the_order_of_their_queue() {
        let all = || vec![request(None, "run"), request(Some(1), "b"), request(Some(0), "a")];
        let text = requests(all(), false);
        let row = |line: &str| line.split(',').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
        let rows: Vec<_> = text.lines().map(row).collect();
        assert_eq!(rows[0], REQUESTS);
        let first = ["low", "s", "3", "0", "a", "1970-01-01T00:00:00Z", "2", "0", "0s", NOT_STARTED];
        assert_eq!(rows[1], first);
        assert_eq!((rows[2][3].as_str(), rows[3][3].as_str(), rows[3][4].as_str()), ("1", "-1", "run"));
        assert_ne!(rows[3][9], NOT_STARTED);
        let text = requests(all(), true);
        let details = ["a", "list", "/apis/apps/v1/namespaces/n/deployments/d/status", "n", "d", "apps/v1"];
        let rows: Vec<_> = text.lines().map(row).collect();
        assert_eq!((rows[0].len(), &rows[1][10..16]), (18, &details.map(str::to_owned)[..]));
        assert_eq!(rows[1][16..], ["deployments", "status"]);
    }

    #[test]
    fn the_name_of_a_user_does_not_look_like_other_cells_or_rows() {
        let text = requests(vec![request(None, &format!("eve\nlow, s, {}", "x".repeat(1000)))], true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[1].split(',').count()), (2, 18));
        assert!(lines[1].contains("eve?low? s? x") && lines[1].len() < 2000);
    }
}
