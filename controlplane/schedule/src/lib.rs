//! Schedules of cron jobs. Source: `github.com/robfig/cron/v3`, whose syntax upstream accepts.
//!
//! Time zones come from the IANA database of the system, or from the bundled database if the system has none. This is a
//! separate crate, because a node without a control plane needs neither the parser nor the database.

mod duration;
mod fields;
mod search;

use std::str::FromStr;

use jiff::{SignedDuration, Timestamp};

pub use fields::FieldError;
use fields::Fields;

/// Maximum bytes of a schedule.
const MAX_BYTES: usize = 1024;
const NANOSECONDS: i64 = 1_000_000_000;

/// A schedule: five fields, or a descriptor such as `@daily` or `@every 1h`. Either can have a time zone as a prefix,
/// such as `TZ=Europe/Berlin `.
#[derive(Clone, Debug)]
pub struct Schedule {
    form: Form,
    /// The time zone of the prefix.
    zone: Option<TimeZone>,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Fields(Fields),
    /// A constant interval in seconds, at least 1.
    Every(i64),
}

/// A time zone of the IANA database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeZone(jiff::tz::TimeZone);

/// The text is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// The text is longer than 1024 bytes.
    #[error("must be no more than {MAX_BYTES} bytes")]
    TooLong,
    /// The text is empty.
    #[error("empty spec string")]
    Empty,
    /// Nothing follows the time zone.
    #[error("invalid schedule format: no space after the time zone in {0}")]
    OnlyZone(String),
    /// The time zone does not exist.
    #[error("provided bad location {0}: unknown time zone {0}")]
    Zone(String),
    /// Not five fields.
    #[error("expected exactly 5 fields, found {count}: [{fields}]")]
    Fields {
        /// Number of fields.
        count: usize,
        /// The fields with a space between them.
        fields: String,
    },
    /// A descriptor that does not exist.
    #[error("unrecognized descriptor: {0}")]
    Descriptor(String),
    /// An interval that is not a duration.
    #[error("failed to parse duration {0}")]
    Duration(String),
    /// A field is malformed.
    #[error(transparent)]
    Field(#[from] FieldError),
}

/// The text is not the name of a time zone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown time zone {0}")]
pub struct TimeZoneError(String);

// === impl TimeZone ===

impl TimeZone {
    /// Coordinated Universal Time.
    pub fn utc() -> Self {
        Self(jiff::tz::TimeZone::UTC)
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
        Ok(Self(zone))
    }
}

// === impl Schedule ===

impl Schedule {
    /// The first time of the schedule after `after`, a whole second. `None` if the schedule does not fire within five
    /// years, for example on 30 February. `zone` applies to schedules without a prefix.
    pub fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        let zone = self.zone.as_ref().unwrap_or(zone);
        // Before 1970 the fraction of a second is negative.
        let second = after.as_second() - i64::from(after.subsec_nanosecond() < 0);
        let next = match &self.form {
            Form::Every(seconds) => second.checked_add(*seconds)?,
            Form::Fields(fields) => search::next(fields, second, &zone.0)?,
        };
        Timestamp::from_second(next).ok()
    }

    /// The last time of the schedule at or before `until`. `first` must be a time of the schedule at or before `until`.
    /// The times of `@every` are counted from it. The cost does not depend on the number of times between `first` and
    /// `until`.
    pub fn last(&self, first: Timestamp, until: Timestamp, zone: &TimeZone) -> Timestamp {
        if let Form::Every(seconds) = &self.form {
            let span = until.duration_since(first).as_secs().max(0);
            return first.checked_add(SignedDuration::from_secs(span - span % seconds)).unwrap_or(first);
        }
        // The last time is between `last` and `end`. Each step halves the distance, because stepping through the times
        // of `* * * 1-6 *` takes hundreds of thousands of searches.
        let (mut last, mut end) = (first, until.as_second());
        while last.as_second() < end {
            let middle = last.as_second() + (end - last.as_second()) / 2;
            let next = Timestamp::from_second(middle).ok().and_then(|middle| self.next(middle, zone));
            match next.filter(|next| *next <= until) {
                Some(next) => last = next,
                None => end = middle,
            }
        }
        last
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        if text.len() > MAX_BYTES {
            return Err(ScheduleError::TooLong);
        }
        if text.is_empty() {
            return Err(ScheduleError::Empty);
        }
        let (zone, text) = split_zone(text)?;
        Ok(Self { form: form(text)?, zone })
    }
}

/// The time zone of a prefix, and the rest of the text. The time zone `Local` has no effect.
fn split_zone(text: &str) -> Result<(Option<TimeZone>, &str), ScheduleError> {
    let Some(rest) = text.strip_prefix("TZ=").or_else(|| text.strip_prefix("CRON_TZ=")) else {
        return Ok((None, text));
    };
    // Upstream panics without a space, and reports the panic as an error.
    let (name, rest) = rest.split_once(' ').ok_or_else(|| ScheduleError::OnlyZone(text.to_owned()))?;
    let zone = match name {
        "" => Some(TimeZone::utc()),
        "Local" => None,
        _ => Some(name.parse::<TimeZone>().map_err(|TimeZoneError(name)| ScheduleError::Zone(name))?),
    };
    Ok((zone, rest.trim()))
}

/// Parses a schedule without its time zone.
fn form(text: &str) -> Result<Form, ScheduleError> {
    let fields = match text {
        "@yearly" | "@annually" => "0 0 1 1 *",
        "@monthly" => "0 0 1 * *",
        "@weekly" => "0 0 * * 0",
        "@daily" | "@midnight" => "0 0 * * *",
        "@hourly" => "0 * * * *",
        _ => text,
    };
    if let Some(interval) = fields.strip_prefix("@every ") {
        let nanoseconds = duration::nanoseconds(interval);
        let nanoseconds = nanoseconds.ok_or_else(|| ScheduleError::Duration(interval.to_owned()))?;
        // As upstream, the interval has no fraction of a second, and is at least a second.
        return Ok(Form::Every((nanoseconds / NANOSECONDS).max(1)));
    }
    if fields.starts_with('@') {
        return Err(ScheduleError::Descriptor(text.to_owned()));
    }
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let Ok(five) = <[&str; 5]>::try_from(&fields[..]) else {
        return Err(ScheduleError::Fields { count: fields.len(), fields: fields.join(" ") });
    };
    Ok(Form::Fields(Fields::parse(five)?))
}

#[cfg(test)]
mod tests;
