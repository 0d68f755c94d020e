//! The rules for parameters of a log request. Source: `ValidatePodLogOptions` of `pkg/apis/core/validation`.

use coracle_kinds::validate::{Causes, Path};
use serde_json::Value;

use crate::{
    error::{ApiError, Result},
    request::Query,
};

const STREAMS: &[&str] = &["All", "Stderr", "Stdout"];

/// Refuses invalid parameters, before the pod is looked up.
pub(super) fn check(query: &Query, pod: &str) -> Result<()> {
    for name in ["tailLines", "limitBytes", "sinceSeconds"] {
        query.check_number(name)?;
    }
    let since = query.get("sinceTime");
    if !since.is_empty() && since.parse::<jiff::Timestamp>().is_err() {
        let message = format!("sinceTime {since:?} is not a time as 2006-01-02T15:04:05Z");
        return Err(ApiError::bad_request(message));
    }
    let causes = causes(query).into_list();
    if causes.is_empty() {
        return Ok(());
    }
    let mut error = ApiError::invalid_parameters("PodLogOptions", "", &causes);
    error.message = error.message.replacen("PodLogOptions. \"\"", &format!("PodLogOptions \"{pod}\""), 1);
    if let Some(details) = error.details.as_object_mut() {
        details.remove("group");
        details.insert("name".to_owned(), pod.into());
    }
    Err(error)
}

fn causes(query: &Query) -> Causes {
    let mut causes = Causes::default();
    let number = |name: &str| query.get(name).parse::<i64>().ok();
    for (name, least, detail) in
        [("tailLines", 0, "must be greater than or equal to 0"), ("limitBytes", 1, "must be greater than 0")]
    {
        if let Some(value) = number(name).filter(|value| *value < least) {
            causes.invalid(&Path::root(name), &value.into(), detail);
        }
    }
    match number("sinceSeconds") {
        Some(_) if !query.get("sinceTime").is_empty() => {
            let detail = "at most one of `sinceTime` or `sinceSeconds` may be specified";
            causes.forbidden(&Path::root("[]"), detail);
        }
        Some(value) if value < 1 => {
            causes.invalid(&Path::root("sinceSeconds"), &value.into(), "must be greater than 0");
        }
        _ => {}
    }
    let stream = query.get("stream");
    if !stream.is_empty() && !STREAMS.contains(&stream) {
        causes.unsupported(&Path::root("stream"), &Value::from(stream), STREAMS);
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_parameters_of_logs_are_refused() {
        let check = |query: &str| check(&Query::parse(query), "p");
        for good in
            ["", "tailLines=0&limitBytes=1&sinceSeconds=1", "sinceTime=2020-01-01T00:00:00Z", "stream=Stdout"]
        {
            assert!(check(good).is_ok(), "{good}");
        }
        for (query, code, field) in [
            ("tailLines=-1", 422, "tailLines"),
            ("limitBytes=0", 422, "limitBytes"),
            ("sinceSeconds=0", 422, "sinceSeconds"),
            ("sinceSeconds=1&sinceTime=2020-01-01T00:00:00Z", 422, "[]"),
            ("stream=x", 422, "stream"),
            ("tailLines=x", 400, ""),
            ("sinceTime=x", 400, ""),
        ] {
            let error = check(query).unwrap_err();
            let found = error.details["causes"][0]["field"].as_str().unwrap_or_default();
            assert_eq!((error.code, found), (code, field), "{query}: {}", error.message);
        }
        let error = check("tailLines=-1").unwrap_err();
        let message = "PodLogOptions \"p\" is invalid: tailLines: Invalid value: -1: must be greater than or equal to 0";
        assert_eq!((error.message.as_str(), &error.details["name"]), (message, &"p".into()));
    }
}
