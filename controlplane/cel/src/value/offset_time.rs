//! Points in time. Each keeps the offset from UTC of the text that it was read from. As in Go's `time.Time`, `string()`
//! shows this offset.

use std::fmt;

use jiff::Timestamp;
use jiff::tz::{Offset, TimeZone};

/// A point in time with an offset from UTC. Equality compares the point in time only.
#[derive(Clone, Copy, Debug)]
pub struct OffsetTime {
    at: Timestamp,
    offset: Offset,
}

impl OffsetTime {
    /// A point in time without an offset.
    pub(crate) fn utc(at: Timestamp) -> OffsetTime {
        OffsetTime { at, offset: Offset::UTC }
    }

    /// Reads a date with a time, or a date at midnight.
    pub(crate) fn parse(text: &str) -> Option<OffsetTime> {
        if let Ok(at) = text.parse::<Timestamp>() {
            let zone = text.len().checked_sub(6).and_then(|start| text.get(start..));
            let offset = zone.filter(|zone| zone.starts_with(['+', '-'])).and_then(parse_offset);
            return Some(OffsetTime { at, offset: offset.unwrap_or(Offset::UTC) });
        }
        let date = text.parse::<jiff::civil::Date>().ok()?;
        date.to_zoned(TimeZone::UTC).ok().map(|zoned| OffsetTime::utc(zoned.timestamp()))
    }

    /// The point in time.
    pub(crate) fn at(self) -> Timestamp {
        self.at
    }

    /// Whether this is Go's zero time: the beginning of the year 1.
    pub(crate) fn is_zero(self) -> bool {
        self.at.as_second() == -62_135_596_800 && self.at.subsec_nanosecond() == 0
    }

    /// Another point in time with the same offset.
    pub(crate) fn moved(self, at: Timestamp) -> OffsetTime {
        OffsetTime { at, ..self }
    }
}

impl PartialEq for OffsetTime {
    fn eq(&self, other: &OffsetTime) -> bool {
        self.at == other.at
    }
}

impl fmt::Display for OffsetTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.offset == Offset::UTC {
            return fmt::Display::fmt(&self.at, f);
        }
        fmt::Display::fmt(&self.at.display_with_offset(self.offset), f)
    }
}

/// Reads an offset, such as `-08:00` or `05:30`.
pub(crate) fn parse_offset(text: &str) -> Option<Offset> {
    let (sign, rest) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let (hours, minutes) = rest.split_once(':')?;
    let (hours, minutes): (i32, i32) = (hours.parse().ok()?, minutes.parse().ok()?);
    if !(0..=23).contains(&hours) || !(0..=59).contains(&minutes) {
        return None;
    }
    Offset::from_seconds(sign * (hours * 3600 + minutes * 60)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_with_the_offset_of_its_text() {
        for (text, expected) in [
            ("2011-08-18T19:03:37.010000000+01:00", "2011-08-18T19:03:37.01+01:00"),
            ("2011-08-18T19:03:37-08:30", "2011-08-18T19:03:37-08:30"),
            ("2011-08-18T19:03:37+00:00", "2011-08-18T19:03:37Z"),
            ("2011-08-18T19:03:37Z", "2011-08-18T19:03:37Z"),
            ("2011-08-18", "2011-08-18T00:00:00Z"),
        ] {
            assert_eq!(OffsetTime::parse(text).unwrap().to_string(), expected);
        }
        let [one, same] = ["2011-08-18T19:00:00+01:00", "2011-08-18T18:00:00Z"].map(OffsetTime::parse);
        assert_eq!(one, same);
        assert!(OffsetTime::parse("é").is_none());
    }
}
