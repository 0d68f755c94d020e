//! Match conditions of authorization webhooks: CEL expressions over the `spec` of a SubjectAccessReview.
//!
//! Source: `k8s.io/apiserver/pkg/authorization/cel`.

use std::sync::{Arc, LazyLock};

use coracle_cel::{Environment, Field, ObjectType, Program, Session, Shared, Type, Value as Cel};
use coracle_values::CollectMap;
use serde_json::{Map, Value};

/// Maximum number of conditions of a webhook.
const MAX_CONDITIONS: usize = 64;
/// Maximum cost of all conditions of a webhook for one request.
const MAX_COST: u64 = 2_500_000;

static REQUEST: LazyLock<Type> = LazyLock::new(request);
static NONE: LazyLock<Shared> = LazyLock::new(Shared::default);

/// The conditions of one webhook. Without conditions all requests match.
#[derive(Debug, Default)]
pub(super) struct MatchConditions(Vec<Program>);

// === impl MatchConditions ===

impl MatchConditions {
    /// Compiles `matchConditions`.
    ///
    /// # Errors
    /// An expression does not compile, or its type is not `bool`.
    pub(super) fn compile(list: &Value) -> Result<Self, String> {
        let list = list.as_array().map_or(&[][..], Vec::as_slice);
        if list.len() > MAX_CONDITIONS {
            return Err(format!("matchConditions: must have at most {MAX_CONDITIONS} items"));
        }
        let environment = Environment::default().variable("request", REQUEST.clone());
        let mut programs = Vec::new();
        for (index, condition) in list.iter().enumerate() {
            let field = format!("matchConditions[{index}].expression");
            let source = condition["expression"].as_str().unwrap_or_default().trim();
            let program =
                Program::compile(source, &environment).map_err(|error| format!("{field}: {error}"))?;
            if *program.kind() != Type::Bool {
                return Err(format!("{field}: must evaluate to bool but got {}", program.kind()));
            }
            programs.push(program);
        }
        Ok(Self(programs))
    }

    /// Whether all conditions are true. A false condition takes precedence over a failed condition.
    ///
    /// # Errors
    /// A condition failed, and none is false.
    pub(super) fn matches(&self, spec: &Value) -> Result<bool, String> {
        if self.0.is_empty() {
            return Ok(true);
        }
        let spec = with_empty_fields(spec);
        let session = Session::new(vec![("request", Cel::from_json(&spec, &REQUEST))], &NONE);
        let (mut budget, mut failure) = (MAX_COST, None);
        for program in &self.0 {
            let (result, cost) = session.evaluate(program, budget);
            budget = budget.saturating_sub(cost);
            match result {
                Ok(Cel::Bool(true)) => {}
                Ok(Cel::Bool(false)) => return Ok(false),
                Ok(_) => failure = Some("a match condition did not evaluate to a bool".to_owned()),
                Err(error) => failure = Some(format!("a match condition failed: {error}")),
            }
        }
        failure.map_or(Ok(true), Err)
    }
}

/// The spec with empty values for omitted fields, as upstream, so that expressions need no `has`. Otherwise a client
/// could bypass the webhook: a selector such as `key` has no values, and the condition would fail.
fn with_empty_fields(spec: &Value) -> Value {
    const ATTRIBUTES: [&str; 7] =
        ["namespace", "verb", "group", "version", "resource", "subresource", "name"];
    let mut spec = spec.clone();
    if let Some(attributes) = spec["resourceAttributes"].as_object_mut() {
        for field in ATTRIBUTES {
            attributes.entry(field).or_insert_with(|| "".into());
        }
        for selector in ["fieldSelector", "labelSelector"] {
            let selector = attributes.get_mut(selector).and_then(|selector| selector.get_mut("requirements"));
            let requirements = selector.and_then(Value::as_array_mut).into_iter().flatten();
            for requirement in requirements.filter_map(Value::as_object_mut) {
                requirement.entry("values").or_insert_with(|| Value::Array(Vec::new()));
            }
        }
    }
    if let Some(fields) = spec.as_object_mut() {
        // v1beta1 names the field `group`; expressions always use the name of v1, `groups`.
        if let Some(groups) = fields.remove("group") {
            fields.insert("groups".to_owned(), groups);
        }
        fields.entry("uid").or_insert_with(|| "".into());
        fields.entry("extra").or_insert_with(|| Value::Object(Map::new()));
        // Remove the nulls that indexing has added for absent fields.
        fields.retain(|_, value| !value.is_null());
    }
    spec
}

fn request() -> Type {
    let texts = || Type::list(Type::String);
    let attributes = ["namespace", "verb", "group", "version", "resource", "subresource", "name"];
    let attributes = attributes.map(|field| (field, Type::String));
    let requirement = object(
        "kubernetes.SelectorRequirement",
        &[("key", Type::String), ("operator", Type::String), ("values", texts())],
    );
    let selector = |name: &str| {
        let requirements = Type::list(requirement.clone());
        object(name, &[("rawSelector", Type::String), ("requirements", requirements)])
    };
    let selectors = [
        ("fieldSelector", selector("kubernetes.FieldSelectorAttributes")),
        ("labelSelector", selector("kubernetes.LabelSelectorAttributes")),
    ];
    let attributes: Vec<_> = attributes.into_iter().chain(selectors).collect();
    let paths = [("path", Type::String), ("verb", Type::String)];
    object(
        "kubernetes.SubjectAccessReviewSpec",
        &[
            ("resourceAttributes", object("kubernetes.ResourceAttributes", &attributes)),
            ("nonResourceAttributes", object("kubernetes.NonResourceAttributes", &paths)),
            ("user", Type::String),
            ("groups", texts()),
            ("extra", Type::Map(Arc::new(texts()))),
            ("uid", Type::String),
        ],
    )
}

fn object(name: &str, fields: &[(&str, Type)]) -> Type {
    // Upstream does not escape `namespace`, although it is a reserved word of CEL.
    let fields = fields
        .iter()
        .map(|(name, kind)| (Box::from(*name), Field { name: (*name).into(), kind: kind.clone() }));
    Type::Object(Arc::new(ObjectType::new(name, fields.collect_map())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn conditions_see_the_spec_and_false_decides() {
        let of = |sources: &[&str]| {
            let list: Vec<Value> = sources.iter().map(|source| json!({"expression": source})).collect();
            MatchConditions::compile(&list.into())
        };
        let spec = json!({"user": "ann", "groups": ["dev"], "resourceAttributes": {"verb": "get", "resource": "pods"}});
        let failing = "request.nonResourceAttributes.path == '/a'";
        assert_eq!(
            of(&["'dev' in request.groups", "request.resourceAttributes.namespace == ''"])
                .unwrap()
                .matches(&spec),
            Ok(true)
        );
        assert_eq!(of(&[failing, "request.user == 'bob'"]).unwrap().matches(&spec), Ok(false));
        assert!(of(&[failing, "request.user == 'ann'"]).unwrap().matches(&spec).is_err());
        let without_extra = of(&["!('key' in request.extra)"]).unwrap();
        assert_eq!(without_extra.matches(&spec), Ok(true));
        assert!(of(&["request.user"]).unwrap_err().contains("bool"));
        assert!(of(&["request.nothing == 'a'"]).is_err());
    }

    #[test]
    fn a_requirement_without_values_does_not_fail_a_condition() {
        let expression =
            "request.resourceAttributes.labelSelector.requirements.exists(one, 'a' in one.values)";
        let conditions = MatchConditions::compile(&json!([{"expression": expression}])).unwrap();
        let exists = json!({"key": "b", "operator": "Exists"});
        let with_value = json!({"key": "b", "operator": "In", "values": ["a"]});
        for (requirements, expect) in [(json!([exists]), false), (json!([exists, with_value]), true)] {
            let attributes = json!({"labelSelector": {"requirements": requirements}});
            assert_eq!(conditions.matches(&json!({"resourceAttributes": attributes})), Ok(expect));
        }
    }

    #[test]
    fn the_number_and_cost_of_conditions_are_limited() {
        let of = |source: &str, count: usize| {
            MatchConditions::compile(&vec![json!({"expression": source}); count].into())
        };
        assert!(of("true", 64).is_ok());
        assert!(of("true", 65).err().unwrap().contains("must have at most 64 items"));
        let nested = "request.groups.all(a, request.groups.all(b, request.groups.all(c, true)))";
        let conditions = of(nested, 1).unwrap();
        assert_eq!(conditions.matches(&json!({"groups": ["dev", "ops"]})), Ok(true));
        assert!(conditions.matches(&json!({"groups": vec!["dev"; 300]})).is_err());
    }
}
