//! Schedules of cron jobs. Source: `github.com/robfig/cron/v3`, whose syntax upstream accepts.
//!
//! Time zones come from the IANA database: the system's, otherwise the bundled one. A crate of its own, because a node alone
//! needs neither the parser nor the database.

use std::str::FromStr;

use jiff::{SignedDuration, Timestamp};

/// Maximum bytes of a schedule.
const MAX_BYTES: usize = 1024;

/// A schedule: five fields, or a descriptor such as `@daily` or `@every 1h`.
#[derive(Clone, Debug)]
pub struct Schedule(Form);

#[derive(Clone, Debug)]
enum Form {
    /// The five fields, in the form of the parser.
    Fields(String),
    /// A constant interval of whole seconds.
    Every(SignedDuration),
}

/// A time zone of the IANA database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeZone(String);

/// The text is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// The text is longer than 1024 bytes.
    #[error("must be no more than {MAX_BYTES} bytes")]
    TooLong,
    /// Not five fields.
    #[error("expected exactly 5 fields, found {}: [{}]", .0.split_whitespace().count(), .0.split_whitespace().collect::<Vec<_>>().join(" "))]
    Fields(String),
    /// A descriptor that does not exist.
    #[error("unrecognized descriptor: {0}")]
    Descriptor(String),
    /// An interval that is not a duration.
    #[error("failed to parse duration {0}")]
    Duration(String),
    /// A field is malformed.
    #[error("failed to parse {0}")]
    Field(String),
}

/// The text is not the name of a time zone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown time zone {0}")]
pub struct TimeZoneError(String);

// === impl TimeZone ===

impl TimeZone {
    /// Coordinated Universal Time.
    pub fn utc() -> Self {
        Self("UTC".to_owned())
    }
}

impl FromStr for TimeZone {
    type Err = TimeZoneError;

    fn from_str(name: &str) -> Result<Self, TimeZoneError> {
        let error = || TimeZoneError(name.to_owned());
        let good = |part: &str| {
            (1..=14).contains(&part.len())
                && !part.starts_with('-')
                && !matches!(part, "." | "..")
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_+".contains(&byte))
        };
        if !name.split('/').all(good) {
            return Err(error());
        }
        let zone = jiff::tz::TimeZone::get(name).map_err(|_unknown| error())?;
        // Names of time zones are case-sensitive in upstream.
        if zone.iana_name() != Some(name) {
            return Err(error());
        }
        Ok(Self(name.to_owned()))
    }
}

// === impl Schedule ===

impl Schedule {
    /// The first time after this one. None if the schedule never fires within four years, such as on 30 February.
    pub fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        match &self.0 {
            Form::Every(interval) => {
                let next = after.checked_add(*interval).ok()?;
                Timestamp::from_second(next.as_second()).ok()
            }
            Form::Fields(fields) => {
                let crontab = cronexpr::parse_crontab(&format!("{fields} {}", zone.0)).ok()?;
                crontab.find_next(cronexpr::MakeTimestamp(after)).ok().map(|next| next.timestamp())
            }
        }
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        if text.len() > MAX_BYTES {
            return Err(ScheduleError::TooLong);
        }
        let fields = match text {
            "@yearly" | "@annually" => "0 0 1 1 *",
            "@monthly" => "0 0 1 * *",
            "@weekly" => "0 0 * * 0",
            "@daily" | "@midnight" => "0 0 * * *",
            "@hourly" => "0 * * * *",
            _ => text,
        };
        if let Some(interval) = fields.strip_prefix("@every ") {
            let nanos = duration(interval).ok_or_else(|| ScheduleError::Duration(interval.to_owned()))?;
            // As upstream, the interval has no fraction of a second, and is at least a second.
            return Ok(Self(Form::Every(SignedDuration::from_secs((nanos / 1_000_000_000).max(1)))));
        }
        if fields.starts_with('@') {
            return Err(ScheduleError::Descriptor(text.to_owned()));
        }
        if fields.split_whitespace().count() != 5 {
            return Err(ScheduleError::Fields(fields.to_owned()));
        }
        // `?` means `*`. The parser also accepts extensions that upstream does not have.
        let fields = fields.replace('?', "*");
        if let Some(part) = fields.split([' ', '\t', ',', '-', '/']).find(|part| !is_plain(part)) {
            return Err(ScheduleError::Field(part.to_owned()));
        }
        cronexpr::parse_crontab(&format!("{fields} UTC"))
            .map_err(|_wrong| ScheduleError::Field(format!("schedule {text}")))?;
        Ok(Self(Form::Fields(fields)))
    }
}

/// Whether a part of a field is a number, a star, or the name of a month or a weekday.
fn is_plain(part: &str) -> bool {
    const NAMES: [&str; 19] = [
        "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec", "sun", "mon",
        "tue", "wed", "thu", "fri", "sat",
    ];
    part.bytes().all(|byte| byte.is_ascii_digit() || byte == b'*')
        || NAMES.contains(&part.to_ascii_lowercase().as_str())
}

/// Parses a duration in the form of Go's `time.ParseDuration`, such as `1h30m`, `1.5h` or `90s`: nanoseconds.
fn duration(text: &str) -> Option<i64> {
    let is_negative = text.starts_with('-');
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return Some(0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total = 0_u128;
    while !rest.is_empty() {
        let part;
        (part, rest) = first_part(rest)?;
        total = total.checked_add(part)?;
    }
    let total = i64::try_from(total).ok()?;
    Some(if is_negative { -total } else { total })
}

/// The first number with its unit in nanoseconds, and the rest of the text.
fn first_part(text: &str) -> Option<(u128, &str)> {
    /// Maximum number of digits of a fraction that count. Further digits change the result by less than a nanosecond.
    const FRACTION_MAX: usize = 15;
    let (whole, rest) = digits(text);
    let (fraction, rest) = rest.strip_prefix('.').map_or(("", rest), digits);
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let end = rest.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(end);
    let unit: u128 = match unit {
        "h" => 3_600_000_000_000,
        "m" => 60_000_000_000,
        "s" => 1_000_000_000,
        "ms" => 1_000_000,
        // The micro sign, and the Greek letter.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ns" => 1,
        _ => return None,
    };
    let number = |digits: &str| if digits.is_empty() { Some(0) } else { digits.parse::<u64>().ok() };
    let fraction = fraction.get(..FRACTION_MAX).unwrap_or(fraction);
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let whole = u128::from(number(whole)?) * unit;
    Some((whole + u128::from(number(fraction)?) * unit / scale, rest))
}

/// The digits at the start of a text, and the rest.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(schedule: &str, after: &str, zone: &str) -> Option<String> {
        let schedule: Schedule = schedule.parse().unwrap();
        schedule.next(after.parse().unwrap(), &zone.parse().unwrap()).map(|next| next.to_string())
    }

    #[test]
    fn the_next_time_follows_fields_descriptors_and_time_zones() {
        let noon = "2026-01-01T12:00:00Z";
        for (schedule, zone, expect) in [
            ("*/5 * * * *", "UTC", "2026-01-01T12:05:00Z"),
            ("30 4 ? * mon", "UTC", "2026-01-05T04:30:00Z"),
            ("0 0 13 * 5", "UTC", "2026-01-02T00:00:00Z"),
            ("@hourly", "UTC", "2026-01-01T13:00:00Z"),
            ("@every 1h30m", "UTC", "2026-01-01T13:30:00Z"),
            ("@every 1h30m10.5s", "UTC", "2026-01-01T13:30:10Z"),
            ("@every 1.5h", "UTC", "2026-01-01T13:30:00Z"),
            ("@every .5m", "UTC", "2026-01-01T12:00:30Z"),
            ("@every 1.m1500000us500000µs", "UTC", "2026-01-01T12:01:02Z"),
            ("@every 0.0000000000000000000001h", "UTC", "2026-01-01T12:00:01Z"),
            ("@every -1h", "UTC", "2026-01-01T12:00:01Z"),
            ("@every 0", "UTC", "2026-01-01T12:00:01Z"),
            ("0 0 * * *", "Asia/Tokyo", "2026-01-01T15:00:00Z"),
            ("0 0 29 2 *", "UTC", "2028-02-29T00:00:00Z"),
        ] {
            assert_eq!(next(schedule, noon, zone).as_deref(), Some(expect), "for {schedule}");
        }
        assert_eq!(next("0 0 30 2 *", noon, "UTC"), None);
        let late = next("@every 1.9s", "2026-01-01T12:00:00.7Z", "UTC");
        assert_eq!(late.as_deref(), Some("2026-01-01T12:00:01Z"), "fractions do not add up");
    }

    #[test]
    fn malformed_schedules_are_refused() {
        let error = |text: &str| text.parse::<Schedule>().unwrap_err().to_string();
        assert_eq!(error("* * *"), "expected exactly 5 fields, found 3: [* * *]");
        assert_eq!(error("@noon"), "unrecognized descriptor: @noon");
        assert_eq!(error("@every soon"), "failed to parse duration soon");
        for text in
            ["", " ", "1", ".s", "1..5s", "1h 30m", "1d", "--1s", "+", "3000000h", "99999999999999999999s"]
        {
            assert_eq!(error(&format!("@every {text}")), format!("failed to parse duration {text}"));
        }
        for text in ["60 * * * *", "* * L * *", "* * * * 5#2", "H * * * *", "5-1 * * * *", "TZ=UTC * * * *"] {
            assert!(text.parse::<Schedule>().is_err(), "for {text}");
        }
        assert!("* ".repeat(600).parse::<Schedule>().is_err());
    }

    #[test]
    fn only_names_of_the_database_are_time_zones() {
        for (name, known) in [
            ("UTC", true),
            ("Europe/Berlin", true),
            ("europe/berlin", false),
            ("../etc/passwd", false),
            ("Mars/Base", false),
            ("", false),
        ] {
            assert_eq!(name.parse::<TimeZone>().is_ok(), known, "for {name}");
        }
    }
}
