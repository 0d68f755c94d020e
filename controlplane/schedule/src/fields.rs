//! The five fields of a schedule as sets of numbers. Source: `parser.go`.

use std::num::{IntErrorKind, ParseIntError};

/// Bit of a field that is a star, without a step above 1.
const STAR: u64 = 1 << 63;

const MINUTES: Bounds = Bounds { min: 0, max: 59, names: &[] };
const HOURS: Bounds = Bounds { min: 0, max: 23, names: &[] };
const DAYS: Bounds = Bounds { min: 1, max: 31, names: &[] };
const MONTHS: Bounds = Bounds {
    min: 1,
    max: 12,
    names: &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
};
const WEEKDAYS: Bounds = Bounds { min: 0, max: 6, names: &["sun", "mon", "tue", "wed", "thu", "fri", "sat"] };

/// The fields of a schedule. Each is a set of bits, one for each number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fields {
    minutes: u64,
    hours: u64,
    days: u64,
    months: u64,
    weekdays: u64,
}

/// A field of a schedule is malformed. The texts are those of upstream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// Neither a number nor a name.
    #[error("failed to parse int from {0}: strconv.Atoi: parsing {0:?}: invalid syntax")]
    Syntax(String),
    /// A number of more than 64 bits.
    #[error("failed to parse int from {0}: strconv.Atoi: parsing {0:?}: value out of range")]
    OutOfRange(String),
    /// A number below zero.
    #[error("negative number ({number}) not allowed: {text}")]
    Negative {
        /// The number.
        number: i64,
        /// The number as it is written.
        text: String,
    },
    /// A range with more than two ends.
    #[error("too many hyphens: {0}")]
    Hyphens(String),
    /// A range with more than one step.
    #[error("too many slashes: {0}")]
    Slashes(String),
    /// The start of a range is too low.
    #[error("beginning of range ({start}) below minimum ({min}): {text}")]
    Low {
        /// The start of the range.
        start: u64,
        /// The lowest number of the field.
        min: u64,
        /// The range.
        text: String,
    },
    /// The end of a range is too high.
    #[error("end of range ({end}) above maximum ({max}): {text}")]
    High {
        /// The end of the range.
        end: u64,
        /// The highest number of the field.
        max: u64,
        /// The range.
        text: String,
    },
    /// A range whose end is before its start.
    #[error("beginning of range ({start}) beyond end of range ({end}): {text}")]
    Reversed {
        /// The start of the range.
        start: u64,
        /// The end of the range.
        end: u64,
        /// The range.
        text: String,
    },
    /// A step of zero.
    #[error("step of range should be a positive number: {0}")]
    Step(String),
}

/// The numbers that a field can have.
struct Bounds {
    min: u64,
    max: u64,
    /// Names of the numbers, beginning with the lowest number.
    names: &'static [&'static str],
}

// === impl Fields ===

impl Fields {
    /// Parses the fields in their order: minute, hour, day of the month, month, weekday.
    pub(crate) fn parse([minutes, hours, days, months, weekdays]: [&str; 5]) -> Result<Self, FieldError> {
        Ok(Self {
            minutes: field(minutes, &MINUTES)?,
            hours: field(hours, &HOURS)?,
            days: field(days, &DAYS)?,
            months: field(months, &MONTHS)?,
            weekdays: field(weekdays, &WEEKDAYS)?,
        })
    }

    /// Whether a field has no number, such as the field `,`. Then the schedule never fires.
    pub(crate) fn is_empty(&self) -> bool {
        let days = [self.days, self.weekdays];
        let is_empty = |field: u64| field & !STAR == 0;
        [self.minutes, self.hours, self.months].into_iter().any(is_empty)
            || if self.is_any_day() { days.into_iter().any(is_empty) } else { days.into_iter().all(is_empty) }
    }

    /// Whether the schedule has this minute.
    pub(crate) fn has_minute(&self, minute: i8) -> bool {
        has(self.minutes, minute)
    }

    /// Whether the schedule has this hour.
    pub(crate) fn has_hour(&self, hour: i8) -> bool {
        has(self.hours, hour)
    }

    /// Whether the schedule has this month.
    pub(crate) fn has_month(&self, month: i8) -> bool {
        has(self.months, month)
    }

    /// Whether the schedule has this day of the month and this weekday. Sunday is 0. If neither field is a star, one of
    /// the two is sufficient.
    pub(crate) fn has_day(&self, day: i8, weekday: i8) -> bool {
        let (day, weekday) = (has(self.days, day), has(self.weekdays, weekday));
        if self.is_any_day() { day && weekday } else { day || weekday }
    }

    /// Whether the days of the month or the weekdays are a star.
    fn is_any_day(&self) -> bool {
        (self.days | self.weekdays) & STAR != 0
    }
}

fn has(field: u64, number: i8) -> bool {
    u32::try_from(number).is_ok_and(|number| field.checked_shr(number).is_some_and(|bits| bits & 1 == 1))
}

/// Parses a list of ranges. As upstream, empty ranges are ignored.
fn field(text: &str, bounds: &Bounds) -> Result<u64, FieldError> {
    let mut bits = 0;
    for part in text.split(',').filter(|part| !part.is_empty()) {
        bits |= range(part, bounds)?;
    }
    Ok(bits)
}

/// Parses a number, a star, or a range, each with an optional step. `N/STEP` is a range from N to the maximum. As
/// upstream, the end of a range that begins with a star is ignored.
fn range(text: &str, bounds: &Bounds) -> Result<u64, FieldError> {
    let owned = || text.to_owned();
    let (ends, step) = text.split_once('/').map_or((text, None), |(ends, step)| (ends, Some(step)));
    let (low, high) = ends.split_once('-').map_or((ends, None), |(low, high)| (low, Some(high)));
    let is_star = matches!(low, "*" | "?");
    let mut star = if is_star { STAR } else { 0 };
    let (start, mut end) = match high {
        _ if is_star => (bounds.min, bounds.max),
        None => {
            let number = bounds.number(low)?;
            (number, number)
        }
        Some(high) => {
            let start = bounds.number(low)?;
            if high.contains('-') {
                return Err(FieldError::Hyphens(owned()));
            }
            (start, bounds.number(high)?)
        }
    };
    let step = match step {
        None => 1,
        Some(step) if step.contains('/') => return Err(FieldError::Slashes(owned())),
        Some(step) => {
            let step = number(step)?;
            if high.is_none() {
                end = bounds.max;
            }
            if step > 1 {
                star = 0;
            }
            step
        }
    };
    if start < bounds.min {
        return Err(FieldError::Low { start, min: bounds.min, text: owned() });
    }
    if end > bounds.max {
        return Err(FieldError::High { end, max: bounds.max, text: owned() });
    }
    if start > end {
        return Err(FieldError::Reversed { start, end, text: owned() });
    }
    if step == 0 {
        return Err(FieldError::Step(owned()));
    }
    let step = usize::try_from(step).unwrap_or(usize::MAX);
    Ok((start..=end).step_by(step).fold(star, |bits, number| bits | (1_u64 << number)))
}

/// Parses a number of decimal digits with an optional sign.
fn number(text: &str) -> Result<u64, FieldError> {
    let number: i64 = text.parse().map_err(|error: ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => FieldError::OutOfRange(text.to_owned()),
        _ => FieldError::Syntax(text.to_owned()),
    })?;
    u64::try_from(number).map_err(|_negative| FieldError::Negative { number, text: text.to_owned() })
}

// === impl Bounds ===

impl Bounds {
    /// Parses a number or a name.
    fn number(&self, text: &str) -> Result<u64, FieldError> {
        let named = (self.min..).zip(self.names).find(|(_, name)| name.eq_ignore_ascii_case(text));
        named.map_or_else(|| number(text), |(number, _)| Ok(number))
    }
}
