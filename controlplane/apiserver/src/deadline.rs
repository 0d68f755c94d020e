//! The time limit of a request, from its parameter `timeout`. Source: `WithRequestDeadline` of `k8s.io/apiserver`.

use std::time::Duration;

use crate::{
    error::{ApiError, Result},
    request::Query,
};

/// The time limit of a request: the client's limit, but at most `max`. `max` also applies if the client sets no limit.
pub(crate) fn of_request(query: &Query, max: Duration) -> Result<Duration> {
    let text = query.get("timeout");
    if text.is_empty() {
        return Ok(max);
    }
    let seconds = go_seconds(text).map_err(|problem| {
        ApiError::bad_request(format!("invalid timeout specified in the request URL - {problem}"))
    })?;
    let wanted = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    Ok(if wanted.is_zero() { max } else { wanted.min(max) })
}

/// The longest duration of Go, in seconds: 2^63 nanoseconds.
const MAX_SECONDS: f64 = 9_223_372_036.854_776;

/// The seconds of a duration in Go's notation, such as `1m30.5s`. The error is Go's text.
pub(crate) fn go_seconds(text: &str) -> std::result::Result<f64, String> {
    let invalid = || format!("time: invalid duration {text:?}");
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if unsigned == "0" {
        return Ok(0.0);
    }
    if unsigned.is_empty() {
        return Err(invalid());
    }
    let (mut rest, mut total) = (unsigned, 0.0);
    while !rest.is_empty() {
        let (number, after) = split_number(rest);
        if !number.bytes().any(|byte| byte.is_ascii_digit()) {
            return Err(invalid());
        }
        let end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let seconds = match unit {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "" => return Err(format!("time: missing unit in duration {text:?}")),
            unit => return Err(format!("time: unknown unit {unit:?} in duration {text:?}")),
        };
        total += number.parse::<f64>().map_err(|_wrong| invalid())? * seconds;
        if total > MAX_SECONDS {
            return Err(invalid());
        }
        rest = after;
    }
    Ok(if text.starts_with('-') { -total } else { total })
}

/// Splits off the leading number: digits with at most one decimal point.
fn split_number(text: &str) -> (&str, &str) {
    let mut has_point = false;
    let end = text.find(|c: char| {
        let is_second_point = c == '.' && std::mem::replace(&mut has_point, true);
        is_second_point || !(c.is_ascii_digit() || c == '.')
    });
    text.split_at(end.unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RequestInfo;

    #[test]
    fn a_client_may_shorten_the_limit() {
        let limit = |query: &str| {
            let uri = format!("/version?{query}").parse().unwrap();
            of_request(&RequestInfo::parse(&http::Method::GET, &uri).query, Duration::from_secs(60))
        };
        for (query, seconds) in
            [("", 60), ("timeout=0s", 60), ("timeout=3m", 60), ("timeout=5s", 5), ("timeout=-1s", 60)]
        {
            assert_eq!(limit(query).unwrap(), Duration::from_secs(seconds), "{query}");
        }
        let refused = limit("timeout=5").unwrap_err();
        let message = "invalid timeout specified in the request URL - time: missing unit in duration \"5\"";
        assert_eq!((refused.code, refused.message.as_str()), (400, message));
    }

    #[test]
    fn durations_are_read_as_go_reads_them() {
        for (text, seconds) in
            [("0", 0.0), ("0s", 0.0), ("3m", 180.0), ("1h1m1.5s", 3661.5), ("-2ms", -0.002)]
        {
            assert_eq!(go_seconds(text), Ok(seconds), "{text}");
        }
        for (text, error) in [
            ("invalid", "time: invalid duration \"invalid\""),
            ("", "time: invalid duration \"\""),
            ("5", "time: missing unit in duration \"5\""),
            ("5d", "time: unknown unit \"d\" in duration \"5d\""),
            ("1.2.3s", "time: missing unit in duration \"1.2.3s\""),
            ("99999999h", "time: invalid duration \"99999999h\""),
            (".s", "time: invalid duration \".s\""),
        ] {
            assert_eq!(go_seconds(text), Err(error.to_owned()));
        }
    }
}
