//! Parts of timestamps and durations.

use jiff::Timestamp;
use jiff::tz::{TimeZone, TimeZoneDatabase};

use super::failed;
use crate::cost_meter::CostMeter;
use crate::eval_error::{EvalError, Evaluated};
use crate::value::Value;
use crate::value::offset_time::parse_offset;

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    member: bool,
) -> Option<Evaluated<'a>> {
    if !member || !name.starts_with("get") {
        return None;
    }
    let part = match args {
        [Value::Duration(nanoseconds)] => of_duration(name, *nanoseconds),
        [Value::Timestamp(time)] => of_timestamp(name, time.at(), TimeZone::UTC),
        [Value::Timestamp(time), Value::String(zone)] => {
            // Charges the copy of the name in the error.
            if let Err(error) = meter.charge(args[1].cost_size() / 10) {
                return Some(Err(error));
            }
            match time_zone(zone) {
                Some(zone) => of_timestamp(name, time.at(), zone),
                None => return Some(failed(format!("unknown time zone {zone}"))),
            }
        }
        _ => return None,
    };
    Some(meter.charge(1).and(part.map(Value::Int).ok_or(EvalError::NoOverload)))
}

fn of_duration(name: &str, nanoseconds: i64) -> Option<i64> {
    Some(match name {
        "getHours" => nanoseconds / 3_600_000_000_000,
        "getMinutes" => nanoseconds / 60_000_000_000,
        "getSeconds" => nanoseconds / 1_000_000_000,
        // As in cel-go, this is the whole duration. In the specification of CEL it is only the part below a second.
        "getMilliseconds" => nanoseconds / 1_000_000,
        _ => return None,
    })
}

fn of_timestamp(name: &str, at: Timestamp, zone: TimeZone) -> Option<i64> {
    let at = at.to_zoned(zone);
    Some(match name {
        "getFullYear" => at.year().into(),
        "getMonth" => i64::from(at.month()) - 1,
        "getDate" => at.day().into(),
        "getDayOfMonth" => i64::from(at.day()) - 1,
        "getDayOfWeek" => i64::from(at.weekday().to_sunday_zero_offset()),
        "getDayOfYear" => i64::from(at.day_of_year()) - 1,
        "getHours" => at.hour().into(),
        "getMinutes" => at.minute().into(),
        "getSeconds" => at.second().into(),
        "getMilliseconds" => at.millisecond().into(),
        _ => return None,
    })
}

/// An offset such as `-08:00`, or the name of a zone in the database that is part of the program.
fn time_zone(text: &str) -> Option<TimeZone> {
    if matches!(text, "UTC" | "Z" | "") {
        return Some(TimeZone::UTC);
    }
    if !text.contains(':') {
        return TimeZoneDatabase::bundled().get(text).ok();
    }
    parse_offset(text).map(TimeZone::fixed)
}
