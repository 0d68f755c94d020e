//! Durations in tables: `45s`, `3m12s`, `4d`, `2y13d`.

use jiff::Timestamp;
use serde_json::Value;

/// The time from an RFC 3339 text to now, or `<unknown>`.
pub(super) fn age(from: &Value, now: Timestamp) -> String {
    match from.as_str().and_then(|text| text.parse::<Timestamp>().ok()) {
        Some(from) => span(now.as_second() - from.as_second()),
        None => "<unknown>".to_owned(),
    }
}

/// A duration in seconds with at most two units.
pub(super) fn span(seconds: i64) -> String {
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    let days = hours / 24;
    let two = |big: i64, unit: char, small: i64, part: char| match small {
        0 => format!("{big}{unit}"),
        small => format!("{big}{unit}{small}{part}"),
    };
    match seconds {
        ..-1 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        0..120 => format!("{seconds}s"),
        _ if minutes < 10 => two(minutes, 'm', seconds % 60, 's'),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, 'h', minutes % 60, 'm'),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 8 => two(days, 'd', hours % 24, 'h'),
        _ if days < 365 * 2 => format!("{days}d"),
        _ if days < 365 * 8 => two(days / 365, 'y', days % 365, 'd'),
        _ => format!("{}y", days / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_durations_are_shown_in_larger_units() {
        let (minute, hour, day) = (60, 3600, 86_400);
        let cases = [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (192, "3m12s"),
            (10 * minute + 5, "10m"),
            (179 * minute, "179m"),
            (3 * hour, "3h"),
            (7 * hour + 59 * minute, "7h59m"),
            (8 * hour + 59 * minute, "8h"),
            (47 * hour, "47h"),
            (2 * day, "2d"),
            (7 * day + 23 * hour, "7d23h"),
            (8 * day + hour, "8d"),
            (729 * day, "729d"),
            (743 * day, "2y13d"),
            (730 * day, "2y"),
            (8 * 365 * day, "8y"),
        ];
        for (seconds, expect) in cases {
            assert_eq!(span(seconds), expect, "for {seconds}");
        }
    }
}
