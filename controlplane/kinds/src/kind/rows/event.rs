//! Events of `events.k8s.io`: the same objects as core events, in another form.
//!
//! Source: `pkg/apis/events/v1/conversion.go`.

use coracle_values::CollectMap;
use serde_json::{Map, Value};

use super::{KIND, Kind, RULES, Rules};
use crate::kind::definition::StoredAs;
use crate::{table, validate};

/// Names of a field in `events.k8s.io` and in core events. All other fields have the same name in both groups.
const NAMES: [(&str, &str); 7] = [
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("reportingController", "reportingComponent"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

/// Selectable fields in `events.k8s.io` and in core events.
const FIELDS: &[(&str, &str)] = &[
    ("reason", "reason"),
    ("regarding.kind", "involvedObject.kind"),
    ("regarding.namespace", "involvedObject.namespace"),
    ("regarding.name", "involvedObject.name"),
    ("regarding.uid", "involvedObject.uid"),
    ("regarding.apiVersion", "involvedObject.apiVersion"),
    ("regarding.resourceVersion", "involvedObject.resourceVersion"),
    ("regarding.fieldPath", "involvedObject.fieldPath"),
    ("reportingController", "reportingComponent"),
    ("type", "type"),
];

pub(super) const EVENTS: Kind = Kind {
    group: "events.k8s.io",
    kind: "Event",
    plural: "events",
    singular: "event",
    short_names: &["ev"],
    schema: "io.k8s.api.events.v1.Event",
    volatile: true,
    ttl_seconds: 3600,
    stored_as: Some(StoredAs {
        group: "",
        version: "v1",
        plural: "events",
        to_storage,
        from_storage,
        fields: FIELDS,
    }),
    rules: Rules {
        validate: validate::event::event,
        create_on_update: true,
        columns: table::event::COLUMNS,
        cells: |event, now| table::event::cells(&renamed(event.clone(), |(new, core)| (new, core)), now),
        ..RULES
    },
    ..KIND
};

fn to_storage(event: Value) -> Result<Value, String> {
    Ok(renamed(event, |(new, core)| (new, core)))
}

fn from_storage(event: Value) -> Result<Value, String> {
    let mut event = renamed(event, |(new, core)| (core, new));
    if let Some(event) = event.as_object_mut() {
        // The schema requires `eventTime`.
        event.entry("eventTime").or_insert(Value::Null);
    }
    Ok(event)
}

fn renamed<'a>(event: Value, names: impl Fn((&'a str, &'a str)) -> (&'a str, &'a str)) -> Value {
    let Value::Object(event) = event else { return event };
    let name = |field: String| {
        let known = NAMES.into_iter().map(&names).find(|(from, _)| *from == field);
        known.map_or(field, |(_, to)| to.to_owned())
    };
    Value::Object(event.into_iter().map(|(field, value)| (name(field), value)).collect_map::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_forms_have_the_same_content() {
        let core = json!({"apiVersion": "v1", "metadata": {"name": "e"}, "involvedObject": {"kind": "Pod"},
            "message": "m", "reportingComponent": "c", "count": 2, "eventTime": "2026-01-01T00:00:00.000000Z"});
        let new = from_storage(core.clone()).unwrap();
        assert_eq!(
            (&new["regarding"]["kind"], &new["note"], &new["deprecatedCount"]),
            (&json!("Pod"), &json!("m"), &json!(2))
        );
        assert_eq!(new["reportingController"], "c");
        assert_eq!(to_storage(new).unwrap(), core);
    }
}
