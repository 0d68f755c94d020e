//! Missed times of a schedule.

use coracle_schedule::{Schedule, TimeZone};
use jiff::Timestamp;

/// Number of missed times above which a cron job without deadline gets a warning.
pub(super) const MANY_MISSED: i64 = 100;

/// The most recent time and the next time of a schedule.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) missed: Option<Timestamp>,
    /// Whether more than [`MANY_MISSED`] times were missed.
    pub(super) many: bool,
    pub(super) next: Option<Timestamp>,
}

/// The times of a schedule after `from`. The cost does not grow with the number of missed times.
pub(super) fn times(schedule: &Schedule, zone: &TimeZone, from: Timestamp, now: Timestamp) -> Times {
    let next = |after: Timestamp| schedule.next(after, zone);
    let Some(first) = next(from) else { return Times { missed: None, many: false, next: None } };
    if first > now {
        return Times { missed: None, many: false, next: Some(first) };
    }
    let Some(second) = next(first) else { return Times { missed: Some(first), many: false, next: None } };
    let interval = second.duration_since(first).as_secs().max(1);
    let count = now.duration_since(first).as_secs() / interval + 1;
    let missed = schedule.last(first, now, zone);
    Times { missed: Some(missed), many: count > MANY_MISSED, next: next(missed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn of(schedule: &str, from: &str, now: &str) -> (Option<String>, bool, Option<String>) {
        let times = times(&schedule.parse().unwrap(), &TimeZone::utc(), at(from), at(now));
        (times.missed.map(|time| time.to_string()), times.many, times.next.map(|time| time.to_string()))
    }

    /// Schedule, last time, current time, most recent missed time (or `none`), whether many were missed, next time.
    const PAUSES: &str = "
        */5 * * * * | 2026-01-01T12:00:00Z | 2026-01-01T12:03:00Z | none | false | 2026-01-01T12:05:00Z
        */5 * * * * | 2026-01-01T12:00:00Z | 2026-01-01T12:11:00Z | 2026-01-01T12:10:00Z | false | 2026-01-01T12:15:00Z
        */5 * * * * | 2016-01-01T12:00:00Z | 2026-01-01T12:11:00Z | 2026-01-01T12:10:00Z | true | 2026-01-01T12:15:00Z
        0,1 0 1 * * | 2025-10-15T00:00:00Z | 2026-01-20T00:00:00Z | 2026-01-01T00:01:00Z | true | 2026-02-01T00:00:00Z
        * * * 1-6 * | 2016-01-01T00:00:00Z | 2025-12-31T12:00:00Z | 2025-06-30T23:59:00Z | true | 2026-01-01T00:00:00Z
        @every 1ns | 2016-01-01T00:00:00Z | 2026-01-01T00:00:00.5Z | 2026-01-01T00:00:00Z | true | 2026-01-01T00:00:01Z
        @every 1h | 2026-01-01T00:10:20.5Z | 2026-01-01T10:40:00Z | 2026-01-01T10:10:20Z | false | 2026-01-01T11:10:20Z
        @every 7m | 2016-01-01T00:00:00Z | 2016-02-01T00:00:00Z | 2016-01-31T23:59:00Z | true | 2016-02-01T00:06:00Z";

    #[test]
    fn the_most_recent_time_is_found_after_any_pause() {
        for line in PAUSES.lines().skip(1) {
            let fields: Vec<&str> = line.split('|').map(str::trim).collect();
            let &[schedule, from, now, missed, many, next] = fields.as_slice() else { panic!("{line}") };
            let missed = (missed != "none").then(|| missed.to_owned());
            assert_eq!(of(schedule, from, now), (missed, many == "true", Some(next.to_owned())), "{line}");
        }
        assert_eq!(of("0 0 30 2 *", "2026-01-01T12:00:00Z", "2026-01-02T12:00:00Z"), (None, false, None));
    }
}
