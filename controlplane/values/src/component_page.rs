//! The pages `/statusz` and `/flagz` of a component: text for people, or an object for programs. Source:
//! `k8s.io/apiserver/pkg/server/statusz` and `flagz`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::media_type::{MediaType, preferences};

/// The media types of the pages, as errors list them.
pub const MEDIA_TYPES: &str = "application/json, application/yaml, text/plain";

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const YAML: &str = "application/yaml";
/// API group of the objects.
const GROUP: &str = "config.k8s.io";
/// Versions of the objects. They have the same fields.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1beta1"];
const DEPRECATED: &str = "v1alpha1";

/// The content of `/statusz`.
#[derive(Clone, Debug)]
pub struct Status<'a> {
    /// Name of the component, `kubelet`.
    pub component: &'a str,
    /// Start of the process.
    pub started: Timestamp,
    /// The current time.
    pub now: Timestamp,
    /// Version of the program.
    pub version: &'a str,
    /// Kubernetes version that the program emulates, such as `1.36`.
    pub emulated: &'a str,
    /// Paths of other pages for troubleshooting, sorted.
    pub paths: &'a [&'a str],
}

/// A page in the form that the client asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The media type.
    pub media: &'static str,
    /// The body. YAML is in flow style, which is JSON.
    pub body: String,
    /// A warning for the client.
    pub warning: Option<&'static str>,
}

/// The form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    Object { media: &'static str, version: &'static str },
}

/// `/statusz`, in the form that the header `Accept` asks for. `None` if the page has none of these forms.
#[must_use]
pub fn statusz(accept: &str, status: &Status<'_>) -> Option<Page> {
    let form = negotiate(accept, "Statusz")?;
    let up = status.now.duration_since(status.started).as_secs().max(0);
    if form == Form::Text {
        let started = status.started.strftime("%a %b %e %H:%M:%S UTC %Y");
        let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
        return Some(text(&format!(
            "{}\nStarted: {started}\nUp: {hours} hr {minutes:02} min {seconds:02} sec\nBinary version: {}\n\
             Emulation version: {}\nPaths: {}\n",
            heading(status.component, "statusz"),
            status.version,
            status.emulated,
            status.paths.join(" "),
        )));
    }
    Some(object(
        form,
        "Statusz",
        status.component,
        json!({
            "startTime": status.started.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            "uptimeSeconds": up,
            "goVersion": "",
            "binaryVersion": status.version,
            "emulationVersion": status.emulated,
            "paths": status.paths,
        }),
    ))
}

/// `/flagz`: the settings in effect, by the names of their flags. The form is chosen as in [`statusz`].
#[must_use]
pub fn flagz(accept: &str, component: &str, flags: &BTreeMap<String, String>) -> Option<Page> {
    let form = negotiate(accept, "Flagz")?;
    if form == Form::Text {
        let lines: String = flags.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        return Some(text(&format!("{}\n{lines}", heading(component, "flagz"))));
    }
    let fields = if flags.is_empty() { json!({}) } else { json!({"flags": flags}) };
    Some(object(form, "Flagz", component, fields))
}

fn heading(component: &str, page: &str) -> String {
    format!(
        "\n{component} {page}\nWarning: this page is for people. Its format can change with every version.\n"
    )
}

fn text(body: &str) -> Page {
    Page { media: TEXT, body: body.to_owned(), warning: None }
}

fn object(form: Form, kind: &str, component: &str, mut fields: Value) -> Page {
    let Form::Object { media, version } = form else { return text("") };
    fields["kind"] = kind.into();
    fields["apiVersion"] = format!("{GROUP}/{version}").into();
    fields["metadata"] = json!({"name": component});
    let warning = (version == DEPRECATED).then_some("this version of the page is deprecated; use v1beta1");
    Page { media, body: format!("{fields}\n"), warning }
}

/// The form that the client prefers among the forms of the page. `kind` is the kind of the page's object.
fn negotiate(accept: &str, kind: &str) -> Option<Form> {
    if accept.trim().is_empty() {
        return Some(Form::Text);
    }
    preferences(accept).iter().find_map(|media| form(media, kind))
}

/// The form that a media type asks for, if the page has it. An object needs its group, version and kind.
fn form(wanted: &MediaType<'_>, kind: &str) -> Option<Form> {
    let parameters = ["as", "g", "v"].map(|name| wanted.parameter(name));
    if parameters.iter().all(Option::is_none) {
        return includes(wanted, "text/plain").then_some(Form::Text);
    }
    let version =
        VERSIONS.into_iter().find(|version| parameters == [Some(kind), Some(GROUP), Some(*version)])?;
    let media = [JSON, YAML].into_iter().find(|media| includes(wanted, media))?;
    Some(Form::Object { media, version })
}

/// Whether a media type, which may have wildcards, includes `media`.
fn includes(wanted: &MediaType<'_>, media: &str) -> bool {
    let (of, _) = media.split_once('/').unwrap_or_default();
    wanted.name == "*/*" || wanted.name == media || wanted.name.strip_suffix("/*") == Some(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn page(accept: &str) -> Option<Page> {
        let status = Status {
            component: "kubelet",
            started: of("2026-01-02T03:04:05Z"),
            now: of("2026-01-02T04:04:06Z"),
            version: "1.36.0",
            emulated: "1.36",
            paths: &["/flagz", "/healthz"],
        };
        statusz(accept, &status)
    }

    #[test]
    fn the_status_is_text_or_an_object() {
        let text = page("").unwrap();
        assert_eq!((text.media, text.warning), (TEXT, None));
        for line in [
            "kubelet statusz",
            "Started: Fri Jan  2 03:04:05 UTC 2026",
            "Up: 1 hr 00 min 01 sec",
            "Binary version: 1.36.0",
            "Paths: /flagz /healthz",
        ] {
            assert!(text.body.lines().any(|shown| shown == line), "{line}: {}", text.body);
        }
        let object = page("application/json;as=Statusz;g=config.k8s.io;v=v1beta1").unwrap();
        assert_eq!((object.media, object.warning), (JSON, None));
        let expect = json!({"kind": "Statusz", "apiVersion": "config.k8s.io/v1beta1", "metadata": {"name": "kubelet"},
            "startTime": "2026-01-02T03:04:05Z", "uptimeSeconds": 3601, "goVersion": "", "binaryVersion": "1.36.0",
            "emulationVersion": "1.36", "paths": ["/flagz", "/healthz"]});
        assert_eq!(serde_json::from_str::<Value>(&object.body).unwrap(), expect);
        let old = page("application/yaml; v=v1alpha1; g=config.k8s.io; as=Statusz").unwrap();
        assert!(old.media == YAML && old.warning.is_some() && old.body.contains("config.k8s.io/v1alpha1"));
    }

    #[test]
    fn the_flags_are_text_or_an_object() {
        let flags = BTreeMap::from([("b".to_owned(), "2".to_owned()), ("a".to_owned(), String::new())]);
        let text = flagz("*/*", "kubelet", &flags).unwrap();
        assert!(text.body.ends_with("\n\na=\nb=2\n"), "{}", text.body);
        let accept = "application/json;as=Flagz;g=config.k8s.io;v=v1beta1";
        let object = |flags: &BTreeMap<String, String>| {
            serde_json::from_str::<Value>(&flagz(accept, "kubelet", flags).unwrap().body).unwrap()
        };
        assert_eq!(object(&flags)["flags"], json!({"a": "", "b": "2"}));
        assert!(object(&BTreeMap::new()).get("flags").is_none());
    }

    #[test]
    fn an_object_needs_its_group_version_and_kind() {
        for refused in [
            "application/json",
            "application/json;as=Flagz;g=config.k8s.io;v=v1beta1",
            "application/json;as=Statusz;g=config.k8s.io;v=v1",
            "application/json;as=Statusz;v=v1beta1",
            "text/plain;as=Statusz;g=config.k8s.io;v=v1beta1",
            "text/html",
            "text/plain;q=0",
        ] {
            assert_eq!(page(refused), None, "{refused}");
        }
        let object = "application/json;as=Statusz;g=config.k8s.io;v=v1beta1";
        for (accept, media) in [
            ("text/*", TEXT),
            ("application/json,*/*;q=0.1", TEXT),
            (&format!("*/*,{object}"), JSON),
            (&format!("text/plain;q=0.5,{object};q=0.4"), TEXT),
            (&format!("text/plain;q=0.5,{object}"), JSON),
        ] {
            assert_eq!(page(accept).map(|page| page.media), Some(media), "{accept}");
        }
    }
}
