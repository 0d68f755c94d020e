//! The search for the next time of a schedule. Source: `spec.go`.
//!
//! Around changes of the offset of a time zone, the result is the same as upstream's. Times that do not exist are
//! skipped, and times that exist twice fire twice.

use jiff::Timestamp;
use jiff::civil::{DateTime, Time};
use jiff::tz::{Offset, TimeZone};

use crate::fields::Fields;

/// Number of years after which the search ends.
const MAX_YEARS: i16 = 5;
/// Maximum number of steps of a search. A search of five years takes up to 2500 steps.
const MAX_STEPS: u32 = 10_000;
const MINUTE: i64 = 60;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;

/// The state of a search: a time in a time zone.
struct Search<'a> {
    fields: &'a Fields,
    zone: &'a TimeZone,
    /// The time in seconds since 1970.
    second: i64,
    /// The time in the time zone.
    local: DateTime,
    /// Whether the smaller units were set to their minimum. This happens at the first step.
    is_reset: bool,
    steps: u32,
}

/// The result of the search within a unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Found,
    /// The next larger unit has changed. The search starts again with months.
    Wrapped,
}

/// The first time of the fields after a second since 1970. `None` if there is no such time within five years.
pub(crate) fn next(fields: &Fields, after: i64, zone: &TimeZone) -> Option<i64> {
    // Such a schedule never fires. Upstream finds this out by a test of each minute of five years.
    if fields.is_empty() {
        return None;
    }
    let second = after.checked_add(1)?;
    let local = zone.to_datetime(Timestamp::from_second(second).ok()?);
    let mut search = Search { fields, zone, second, local, is_reset: false, steps: 0 };
    let last_year = local.year().saturating_add(MAX_YEARS);
    while search.local.year() <= last_year {
        if search.months()? == Outcome::Found
            && search.days()? == Outcome::Found
            && search.hours()? == Outcome::Found
            && search.minutes()? == Outcome::Found
            && search.seconds()? == Outcome::Found
        {
            // Where a whole day is repeated, the search can go back.
            return (search.second > after).then_some(search.second);
        }
    }
    None
}

// === impl Search ===

impl Search<'_> {
    fn months(&mut self) -> Option<Outcome> {
        while !self.fields.has_month(self.local.month()) {
            if self.starts() {
                self.go_to(self.local.date().first_of_month().to_datetime(Time::midnight()))?;
            }
            let next = self.local.date().last_of_month().tomorrow().ok()?;
            self.go_to(next.to_datetime(self.local.time()))?;
            if self.local.month() == 1 {
                return Some(Outcome::Wrapped);
            }
        }
        Some(Outcome::Found)
    }

    fn days(&mut self) -> Option<Outcome> {
        while !self.fields.has_day(self.local.day(), self.local.weekday().to_sunday_zero_offset()) {
            if self.starts() {
                self.go_to(self.local.date().to_datetime(Time::midnight()))?;
            }
            let before = self.second;
            let next = self.local.date().tomorrow().ok()?;
            self.go_to(next.to_datetime(self.local.time()))?;
            if self.second <= before {
                // The next day does not exist, as 2011-12-30 in Pacific/Apia. Upstream's search does not end.
                self.add(DAY)?;
            }
            // Midnight does not exist on each day.
            let hour = i64::from(self.local.hour());
            if hour > 12 {
                self.add((24 - hour) * HOUR)?;
            } else if hour != 0 {
                self.add(-hour * HOUR)?;
            }
            if self.local.day() == 1 {
                return Some(Outcome::Wrapped);
            }
        }
        Some(Outcome::Found)
    }

    fn hours(&mut self) -> Option<Outcome> {
        while !self.fields.has_hour(self.local.hour()) {
            if self.starts() {
                let hour = Time::new(self.local.hour(), 0, 0, 0).ok()?;
                self.go_to(self.local.date().to_datetime(hour))?;
            }
            self.add(HOUR)?;
            if self.local.hour() == 0 {
                return Some(Outcome::Wrapped);
            }
        }
        Some(Outcome::Found)
    }

    fn minutes(&mut self) -> Option<Outcome> {
        while !self.fields.has_minute(self.local.minute()) {
            if self.starts() {
                self.add(-self.second.rem_euclid(MINUTE))?;
            }
            self.add(MINUTE)?;
            if self.local.minute() == 0 {
                return Some(Outcome::Wrapped);
            }
        }
        Some(Outcome::Found)
    }

    /// Searches the first second of a minute. Schedules have no other seconds.
    fn seconds(&mut self) -> Option<Outcome> {
        if self.local.second() == 0 {
            return Some(Outcome::Found);
        }
        self.is_reset = true;
        self.add(MINUTE - i64::from(self.local.second()))?;
        Some(Outcome::Wrapped)
    }

    /// Whether this is the first step.
    fn starts(&mut self) -> bool {
        !std::mem::replace(&mut self.is_reset, true)
    }

    fn add(&mut self, seconds: i64) -> Option<()> {
        self.set(self.second.checked_add(seconds)?)
    }

    /// Goes to a date and time of day as Go's `time.Date`, which defines the time if it does not exist or exists twice.
    fn go_to(&mut self, local: DateTime) -> Option<()> {
        let utc = Offset::UTC.to_timestamp(local).ok()?.as_second();
        let offset_at = |second: i64| {
            let time = Timestamp::from_second(second).ok()?;
            Some(i64::from(self.zone.to_offset(time).seconds()))
        };
        let offset = offset_at(utc - offset_at(utc)?)?;
        self.set(utc - offset)
    }

    fn set(&mut self, second: i64) -> Option<()> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return None;
        }
        self.local = self.zone.to_datetime(Timestamp::from_second(second).ok()?);
        self.second = second;
        Some(())
    }
}
