//! The pages `dump_priority_levels` and `dump_queues` below `/debug/api_priority_and_fairness`, as tables. Source:
//! `controller_debug.go` of `k8s.io/apiserver/pkg/util/flowcontrol`.

use super::counts::SchemaCounts;
use super::level::Rejection;
use super::level::digest::LevelDigest;

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
const QUEUES: [&str; 8] = [
    "PriorityLevelName",
    "Index",
    "PendingRequests",
    "ExecutingRequests",
    "NextDispatchR",
    "InitialSeatsSum",
    "MaxSeatsSum",
    "TotalWorkSum",
];

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
    table(LEVELS, levels.iter().map(row).collect())
}

/// A row for each queue of each level.
pub(super) fn queues(levels: &[LevelDigest]) -> String {
    let rows = levels.iter().flat_map(|level| {
        level.queues.iter().enumerate().map(|(index, queue)| {
            let seats = queue.waiting_seats.to_string();
            [
                level.name.clone(),
                index.to_string(),
                queue.waiting.to_string(),
                queue.running.to_string(),
                seat_seconds(queue.virtual_start),
                seats.clone(),
                seats,
                seat_seconds(queue.waiting_work),
            ]
        })
    });
    table(QUEUES, rows.collect())
}

/// An amount of seat time, in the format of upstream.
fn seat_seconds(micros: u64) -> String {
    format!("{}.{:06}00ss", micros / 1_000_000, micros % 1_000_000)
}

/// Columns of equal width. Each cell but the last one of a row ends with a comma.
fn table<const N: usize>(header: [&str; N], mut rows: Vec<[String; N]>) -> String {
    rows.insert(0, header.map(str::to_owned));
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
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
    use super::*;

    #[test]
    fn levels_and_queues_are_rows_of_tables() {
        let busy = QueueDigest {
            waiting: 2,
            running: 1,
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
        assert_eq!(row(lines[2]), ["low", "1", "2", "1", "77.64342000ss", "3", "3", "0.00900000ss"]);
    }
}
