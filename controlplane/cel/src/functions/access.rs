//! Functions of `authorizer` (`library/authz.go`).

use coracle_values::names;

use super::failed;
use crate::access::{Access, Stage};
use crate::cost_meter::CostMeter;
use crate::eval_error::Evaluated;
use crate::value::Value;

/// Cost of one check.
const CHECK: u64 = 350_000;

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    let result = match (args.first()?, name, &args[1..]) {
        (Value::Access(access), "check", [Value::String(verb)]) => {
            if !matches!(access.stage, Stage::Path | Stage::Resource) {
                return None;
            }
            if let Err(error) = meter.charge(CHECK) {
                return Some(Err(error));
            }
            let check = access.with(access.stage, |attributes| attributes.verb = verb.to_string());
            Value::Decision(check.host.authorize(&check.attributes).into())
        }
        (Value::Access(access), name, rest) => {
            // Each call in the chain copies the attributes and the arguments.
            let copied = rest.iter().map(Value::cost_size).fold(0, u64::saturating_add);
            if let Err(error) = meter.charge(access.attributes.size().saturating_add(copied) / 10) {
                return Some(Err(error));
            }
            if let Some(problem) = problem(access.stage, name, rest) {
                return Some(failed(problem));
            }
            Value::Access(build(access, name, rest)?)
        }
        (Value::Decision(decision), "allowed", []) => Value::Bool(decision.allowed),
        (Value::Decision(decision), "reason", []) => Value::text(decision.reason.clone()),
        (Value::Decision(decision), "errored", []) => Value::Bool(decision.error.is_some()),
        (Value::Decision(decision), "error", []) => Value::text(decision.error.clone().unwrap_or_default()),
        _ => return None,
    };
    Some(meter.charge(1).map(|()| result))
}

/// The reason why an argument is invalid.
fn problem(stage: Stage, name: &str, args: &[Value<'_>]) -> Option<&'static str> {
    let is_blank = |text: &str| text.trim().is_empty();
    match (stage, name, args) {
        (Stage::Authorizer, "path", [Value::String(path)]) => {
            is_blank(path).then_some("path must not be empty")
        }
        (Stage::Group, "resource", [Value::String(resource)]) => {
            is_blank(resource).then_some("resource must not be empty")
        }
        (Stage::Authorizer, "serviceAccount", [Value::String(namespace), Value::String(name)]) => {
            if !names::dns1123_subdomain(name).is_empty() {
                return Some("Invalid service account name");
            }
            (!names::dns1123_label(namespace).is_empty()).then_some("Invalid service account namespace")
        }
        _ => None,
    }
}

fn build<'a>(access: &Access<'a>, name: &str, args: &[Value<'a>]) -> Option<Access<'a>> {
    let texts: Option<Vec<String>> = args
        .iter()
        .map(|arg| match arg {
            Value::String(text) => Some(text.to_string()),
            _ => None,
        })
        .collect();
    let mut texts = texts?.into_iter();
    let (first, second) = (texts.next()?, texts.next());
    Some(match (access.stage, name, second) {
        (Stage::Authorizer, "serviceAccount", Some(name)) => {
            access.with(Stage::Authorizer, |attributes| attributes.service_account = Some((first, name)))
        }
        (Stage::Authorizer, "path", None) => {
            access.with(Stage::Path, |attributes| attributes.path = Some(first))
        }
        (Stage::Authorizer, "group", None) => {
            access.with(Stage::Group, |attributes| attributes.group = first)
        }
        (Stage::Group, "resource", None) => access.with(Stage::Resource, |attributes| {
            attributes.resource = first;
            attributes.version = "*".to_owned();
        }),
        (Stage::Resource, "subresource", None) => {
            access.with(Stage::Resource, |attributes| attributes.subresource = first)
        }
        (Stage::Resource, "namespace", None) => {
            access.with(Stage::Resource, |attributes| attributes.namespace = first)
        }
        (Stage::Resource, "name", None) => access.with(Stage::Resource, |attributes| attributes.name = first),
        (Stage::Resource, "fieldSelector", None) => {
            access.with(Stage::Resource, |attributes| attributes.field_selector = first)
        }
        (Stage::Resource, "labelSelector", None) => {
            access.with(Stage::Resource, |attributes| attributes.label_selector = first)
        }
        _ => return None,
    })
}
