//! The rules for options of lists and watches. Source: `ValidateListOptions` of `meta/internalversion/validation`.

use coracle_kinds::validate::{Causes, Path};

use crate::{call::Call, error::Result, request::Query};

const NOT_OLDER_THAN: &str = "NotOlderThan";
const EXACT: &str = "Exact";

/// Refuses contradictory options. Values that the request ignores are not checked.
pub(crate) fn check(call: &Call, is_watch: bool) -> Result<()> {
    let query = &call.info.query;
    let causes = match is_watch {
        true => of_watch(query, call.state.features.watch_list),
        false => of_list(query),
    };
    if causes.is_empty() { Ok(()) } else { Err(call.invalid_parameter(|list| *list = causes)) }
}

fn of_list(query: &Query) -> Causes {
    let (mut causes, path) = (Causes::default(), Path::root("resourceVersionMatch"));
    let (rule, revision) = (query.get("resourceVersionMatch"), query.get("resourceVersion"));
    if !rule.is_empty() {
        if revision.is_empty() {
            causes.forbidden(&path, "resourceVersionMatch is forbidden unless resourceVersion is provided");
        }
        without_continue(&mut causes, query);
        if rule != EXACT && rule != NOT_OLDER_THAN {
            causes.unsupported(&path, &rule.into(), &[EXACT, NOT_OLDER_THAN, ""]);
        }
        if rule == EXACT && revision == "0" {
            let detail = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
            causes.forbidden(&path, detail);
        }
    }
    if query.has("sendInitialEvents") {
        causes.forbidden(&Path::root("sendInitialEvents"), "sendInitialEvents is forbidden for list");
    }
    causes
}

fn of_watch(query: &Query, has_watch_list: bool) -> Causes {
    let (mut causes, path) = (Causes::default(), Path::root("resourceVersionMatch"));
    let (rule, has_initial) = (query.get("resourceVersionMatch"), query.has("sendInitialEvents"));
    if has_initial && rule != NOT_OLDER_THAN {
        let detail = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
        causes.forbidden(&path, detail);
    }
    if has_initial && !has_watch_list {
        let detail = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
        causes.forbidden(&Path::root("sendInitialEvents"), detail);
    }
    if !rule.is_empty() {
        if !has_initial {
            let detail = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
            causes.forbidden(&path, detail);
        }
        if rule != NOT_OLDER_THAN {
            causes.unsupported(&path, &rule.into(), &[NOT_OLDER_THAN]);
        }
        without_continue(&mut causes, query);
    }
    causes
}

fn without_continue(causes: &mut Causes, query: &Query) {
    if !query.get("continue").is_empty() {
        let detail = "resourceVersionMatch is forbidden when continue is provided";
        causes.forbidden(&Path::root("resourceVersionMatch"), detail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(causes: Causes) -> Vec<String> {
        causes.into_list().into_iter().map(|cause| format!("{} {}", cause.field, cause.reason)).collect()
    }

    #[test]
    fn only_upstreams_combinations_are_accepted() {
        let (forbidden, unsupported) = ("FieldValueForbidden", "FieldValueNotSupported");
        for (query, list, watch) in [
            ("", vec![], vec![]),
            (
                "resourceVersion=1&resourceVersionMatch=Exact",
                vec![],
                vec![("", forbidden), ("", unsupported)],
            ),
            (
                "resourceVersion=0&resourceVersionMatch=Exact",
                vec![("", forbidden)],
                vec![("", forbidden), ("", unsupported)],
            ),
            ("resourceVersionMatch=NotOlderThan", vec![("", forbidden)], vec![("", forbidden)]),
            (
                "resourceVersion=1&resourceVersionMatch=X",
                vec![("", unsupported)],
                vec![("", forbidden), ("", unsupported)],
            ),
            (
                "resourceVersion=1&resourceVersionMatch=Exact&continue=x",
                vec![("", forbidden)],
                vec![("", forbidden), ("", unsupported), ("", forbidden)],
            ),
            (
                "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=1",
                vec![("send", forbidden)],
                vec![],
            ),
            ("sendInitialEvents=false", vec![("send", forbidden)], vec![("", forbidden)]),
        ] {
            let expect = |all: Vec<(&str, &str)>| -> Vec<String> {
                let field =
                    |short: &str| if short.is_empty() { "resourceVersionMatch" } else { "sendInitialEvents" };
                all.into_iter().map(|(short, reason)| format!("{} {reason}", field(short))).collect()
            };
            let query_of = Query::parse(query);
            assert_eq!(fields(of_list(&query_of)), expect(list), "list {query}");
            assert_eq!(fields(of_watch(&query_of, true)), expect(watch), "watch {query}");
        }
    }

    #[test]
    fn a_watch_that_begins_with_all_objects_needs_its_feature() {
        let of = |text: &str| fields(of_watch(&Query::parse(text), false));
        let refused = ["sendInitialEvents FieldValueForbidden"];
        assert_eq!(of("sendInitialEvents=true&resourceVersionMatch=NotOlderThan"), refused);
        assert_eq!(of("resourceVersion=1"), Vec::<String>::new());
    }
}
