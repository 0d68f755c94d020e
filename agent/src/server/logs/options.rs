//! Options of a log request, from its query. Pure.

use jiff::{SignedDuration, Timestamp};

use super::output::Output;
use crate::server::route::{flag, values};

/// Options of a log request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) follow: bool,
    pub(super) previous: bool,
    pub(super) timestamps: bool,
    pub(super) tail: Option<usize>,
    pub(super) since: Option<Timestamp>,
    pub(super) limit: Option<usize>,
    pub(super) only: Option<Output>,
}

impl Options {
    pub(super) fn of(query: &str, now: Timestamp) -> Result<Options, String> {
        let text = |name: &'static str| values(query, &[name]).find(|value| !value.is_empty());
        let number = |name: &'static str, least: i64| match text(name).map(|value| value.parse::<i64>()) {
            None => Ok(None),
            Some(Ok(number)) if number >= least => Ok(Some(number)),
            Some(_) => Err(format!("{name} must be a number of at least {least}")),
        };
        let seconds =
            number("sinceSeconds", 1)?.and_then(|s| now.checked_sub(SignedDuration::from_secs(s)).ok());
        let time = text("sinceTime")
            .map(|t| t.parse::<Timestamp>().map_err(|_bad| "sinceTime must be an RFC 3339 time".to_owned()))
            .transpose()?;
        if seconds.is_some() && time.is_some() {
            return Err("at most one of sinceTime or sinceSeconds may be specified".to_owned());
        }
        let only = match text("stream").as_deref() {
            None | Some("All") => None,
            Some("Stdout") => Some(Output::Stdout),
            Some("Stderr") => Some(Output::Stderr),
            Some(_) => return Err("stream must be All, Stdout or Stderr".to_owned()),
        };
        let size = |number: Option<i64>| number.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let options = Options {
            follow: flag(query, &["follow"]),
            previous: flag(query, &["previous"]),
            timestamps: flag(query, &["timestamps"]),
            tail: size(number("tailLines", 0)?),
            since: seconds.or(time),
            limit: size(number("limitBytes", 1)?),
            only,
        };
        if options.only.is_some() && options.tail.is_some() {
            return Err("tailLines may not be specified with one stream only".to_owned());
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_and_checked() {
        let now = Timestamp::from_second(100).expect("time");
        let of = |query: &str| Options::of(query, now);
        assert_eq!(of(""), Ok(Options::default()));
        let all = of("follow=true&previous=1&timestamps=true&tailLines=5&limitBytes=10&sinceSeconds=40")
            .expect("options");
        assert!(all.follow && all.previous && all.timestamps);
        assert_eq!((all.tail, all.limit, all.since), (Some(5), Some(10), Timestamp::from_second(60).ok()));
        assert_eq!(
            of("sinceTime=1970-01-01T00%3A00%3A07Z").expect("options").since,
            Timestamp::from_second(7).ok()
        );
        for bad in [
            "tailLines=-1",
            "tailLines=x",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceTime=yesterday",
            "sinceTime=1970-01-01T00:00:07Z&sinceSeconds=1",
            "stream=Both",
            "stream=Stdout&tailLines=1",
        ] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
