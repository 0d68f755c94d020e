//! Windows: options of security contexts, host processes, and fields that pods of one operating system cannot have.
//! Sources: `validateWindowsSecurityContextOptions`, `validateWindowsHostProcessPod`, `validateLinux` and
//! `validateWindows` of `pkg/apis/core/validation`.

use serde_json::Value;

use super::{Causes, Path, format, items, text};

/// Maximum size of a credential specification in bytes.
const MAX_CREDENTIALS: usize = 64 * 1024;
/// Length in bytes from which the domain of a user is too long.
const LONG_DOMAIN: usize = 256;
/// Maximum length of the name of a user in bytes.
const MAX_USER: usize = 104;
/// Fields of the spec that a pod of Windows cannot have.
const SPEC: [&str; 4] = ["hostUsers", "hostPID", "hostIPC", "shareProcessNamespace"];
/// Fields of the security context that a pod of Windows cannot have.
const POD: [&str; 11] = [
    "appArmorProfile",
    "seLinuxOptions",
    "seccompProfile",
    "fsGroup",
    "fsGroupChangePolicy",
    "sysctls",
    "runAsUser",
    "runAsGroup",
    "supplementalGroups",
    "supplementalGroupsPolicy",
    "seLinuxChangePolicy",
];
/// Fields of the security context that a container of Windows cannot have.
const CONTAINER: [&str; 10] = [
    "appArmorProfile",
    "seLinuxOptions",
    "seccompProfile",
    "capabilities",
    "readOnlyRootFilesystem",
    "privileged",
    "allowPrivilegeEscalation",
    "procMount",
    "runAsUser",
    "runAsGroup",
];

/// Checks the options of a security context.
pub(super) fn options(causes: &mut Causes, path: &Path, context: &Value) {
    let (path, options) = (path.field("windowsOptions"), &context["windowsOptions"]);
    if let Some(name) = options["gmsaCredentialSpecName"].as_str() {
        causes.format(&path.field("gmsaCredentialSpecName"), name, format::dns1123_subdomain(name));
    }
    let (here, credentials) = (path.field("gmsaCredentialSpec"), &options["gmsaCredentialSpec"]);
    match credentials.as_str().map(str::len) {
        Some(0) => causes.invalid(&here, credentials, "gmsaCredentialSpec cannot be an empty string"),
        Some(length) if length > MAX_CREDENTIALS => {
            causes.invalid(&here, credentials, "gmsaCredentialSpec size must be under 64 KiB");
        }
        _ => {}
    }
    if let Some(name) = options["runAsUserName"].as_str() {
        for problem in user_problems(name) {
            causes.invalid(&path.field("runAsUserName"), &name.into(), problem);
        }
    }
}

/// Checks the spec of a pod or a pod template.
pub(super) fn spec(causes: &mut Causes, path: &Path, spec: &Value) {
    host_processes(causes, path, spec);
    match text(&spec["os"]["name"]) {
        "linux" => linux(causes, path, spec),
        "windows" => windows(causes, path, spec),
        _ => {}
    }
}

/// The containers with the paths of their security contexts.
fn contexts<'a>(path: &'a Path, spec: &'a Value) -> impl Iterator<Item = (Path, &'a Value)> {
    let lists = ["initContainers", "containers", "ephemeralContainers"];
    lists.into_iter().flat_map(move |list| {
        items(&spec[list]).map(move |(index, container)| {
            (path.field(list).index(index).field("securityContext"), &container["securityContext"])
        })
    })
}

/// Checks that either all containers or no containers are host processes.
fn host_processes(causes: &mut Causes, path: &Path, spec: &Value) {
    let whole = spec["securityContext"]["windowsOptions"]["hostProcess"].as_bool();
    let (mut count, mut all) = (0, 0);
    for (here, context) in contexts(path, spec) {
        let own = context["windowsOptions"]["hostProcess"].as_bool();
        if let (Some(whole), Some(own)) = (whole, own)
            && whole != own
        {
            let detail =
                format!("pod hostProcess value must be identical if both are specified, was {whole}");
            let here = here.field("windowsOptions").field("hostProcess");
            causes.invalid(&here, &own.into(), &detail);
        }
        all += 1;
        count += usize::from(own.or(whole) == Some(true));
    }
    if count == 0 {
        return;
    }
    if count != all {
        let detail =
            "If pod contains any hostProcess containers then all containers must be HostProcess containers";
        causes.invalid(path, &"".into(), detail);
    }
    if spec["hostNetwork"] != true {
        let detail = "hostNetwork must be true if pod contains any hostProcess containers";
        causes.invalid(&path.field("hostNetwork"), &false.into(), detail);
    }
}

fn linux(causes: &mut Causes, path: &Path, spec: &Value) {
    let own = std::iter::once((path.field("securityContext"), &spec["securityContext"]));
    for (here, context) in own.chain(contexts(path, spec)) {
        if !context["windowsOptions"].is_null() {
            let detail = "windows options cannot be set for a linux pod";
            causes.forbidden(&here.field("windowsOptions"), detail);
        }
    }
}

fn windows(causes: &mut Causes, path: &Path, spec: &Value) {
    let detail = "cannot be set for a windows pod";
    for field in SPEC {
        // In Go, `hostPID` and `hostIPC` are not pointers: false counts as absent.
        let is_set = match field {
            "hostPID" | "hostIPC" => spec[field] == true,
            _ => !spec[field].is_null(),
        };
        if is_set {
            causes.forbidden(&path.field(field), detail);
        }
    }
    let here = path.field("securityContext");
    for field in POD.into_iter().filter(|field| !spec["securityContext"][*field].is_null()) {
        causes.forbidden(&here.field(field), detail);
    }
    for (here, context) in contexts(path, spec) {
        for field in CONTAINER.into_iter().filter(|field| !context[*field].is_null()) {
            causes.forbidden(&here.field(field), detail);
        }
    }
}

fn user_problems(name: &str) -> Vec<&'static str> {
    if name.is_empty() {
        return vec!["runAsUserName cannot be an empty string"];
    }
    if name.bytes().any(|byte| byte.is_ascii_control()) {
        return vec!["runAsUserName cannot contain control characters"];
    }
    let (domain, user) = name.split_once('\\').map_or((None, name), |(domain, user)| (Some(domain), user));
    if user.contains('\\') {
        return vec!["runAsUserName cannot contain more than one backslash"];
    }
    let only_dots = !user.is_empty() && user.chars().all(|one| matches!(one, '.' | ' '));
    let has_bad =
        user.contains(['"', '/', '\\', ':', ';', '|', '=', ',', '+', '*', '?', '<', '>', '@', '[', ']']);
    let is_named = domain.is_none_or(|domain| is_net_bios(domain) || is_dns(domain));
    [
        (
            domain.is_some_and(|domain| domain.len() >= LONG_DOMAIN),
            "runAsUserName's Domain length must be under 256 characters",
        ),
        (!is_named, "runAsUserName's Domain doesn't match the NetBios nor the DNS format"),
        (user.is_empty(), "runAsUserName's User cannot be empty"),
        (user.len() > MAX_USER, "runAsUserName's User length must not be longer than 104 characters"),
        (only_dots, "runAsUserName's User cannot contain only periods or spaces"),
        (has_bad, "runAsUserName's User cannot contain the following characters: \"/\\:;|=,+*?<>@[]"),
    ]
    .into_iter()
    .filter_map(|(is_wrong, problem)| is_wrong.then_some(problem))
    .collect()
}

/// Whether a text is the NetBIOS name of a domain: at most 15 characters, and no dot at the beginning.
fn is_net_bios(domain: &str) -> bool {
    let is_good = |one: char| !matches!(one, '\\' | '/' | ':' | '*' | '?' | '"' | '<' | '>' | '|');
    (1..=15).contains(&domain.chars().count()) && !domain.starts_with('.') && domain.chars().all(is_good)
}

fn is_dns(domain: &str) -> bool {
    domain.split('.').all(|label| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    #[test]
    fn names_of_users_are_checked() {
        for name in ["user", "DOMAIN\\user", "a.example.com\\user", "NT AUTHORITY\\x y"] {
            assert!(user_problems(name).is_empty(), "{name}");
        }
        let (long_domain, long_user) = (format!("{}\\u", "a".repeat(256)), "u".repeat(105));
        for (name, count) in [
            ("", 1),
            ("a\nb", 1),
            ("a\\b\\c", 1),
            ("\\user", 1),
            ("DOMAIN\\", 1),
            (". .", 1),
            ("a@b", 1),
            (".dot\\user", 1),
            (&*long_domain, 2),
            (&*long_user, 1),
        ] {
            assert_eq!(user_problems(name).len(), count, "{name}");
        }
    }

    #[test]
    fn a_pod_has_fields_of_its_system() {
        let of = |spec: Value| found(|causes| super::spec(causes, &Path::root("s"), &spec));
        let pod = |system: &str, context: Value| json!({"os": {"name": system}, "containers": [{"securityContext": context}], "hostPID": false});
        assert!(of(pod("linux", json!({"privileged": true}))).is_empty());
        assert_eq!(
            of(pod("windows", json!({"privileged": true, "runAsUser": 1}))),
            [
                "s.containers[0].securityContext.privileged: Forbidden: cannot be set for a windows pod",
                "s.containers[0].securityContext.runAsUser: Forbidden: cannot be set for a windows pod",
            ]
        );
        assert_eq!(
            of(pod("linux", json!({"windowsOptions": {}}))),
            [
                "s.containers[0].securityContext.windowsOptions: Forbidden: windows options cannot be set for a linux pod"
            ]
        );
    }

    #[test]
    fn host_processes_are_all_or_none() {
        let of = |more: Value| {
            let host = json!({"windowsOptions": {"hostProcess": true}});
            let mut spec = json!({"containers": [{"securityContext": host}], "hostNetwork": true});
            spec.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
            found(|causes| super::spec(causes, &Path::root("s"), &spec))
        };
        assert!(of(json!({})).is_empty());
        assert_eq!(of(json!({"hostNetwork": false})).len(), 1);
        assert!(of(json!({"initContainers": [{}]}))[0].contains("all containers must be HostProcess"));
        let other = json!({"windowsOptions": {"hostProcess": false}});
        assert!(of(json!({"securityContext": other}))[0].contains("must be identical"));
    }

    #[test]
    fn credentials_are_named_and_not_empty() {
        let of = |options: Value| {
            found(|causes| super::options(causes, &Path::root("c"), &json!({"windowsOptions": options})))
        };
        assert!(of(json!({"gmsaCredentialSpecName": "a", "gmsaCredentialSpec": "x"})).is_empty());
        assert!(
            of(json!({"gmsaCredentialSpecName": "A b"}))[0]
                .starts_with("c.windowsOptions.gmsaCredentialSpecName")
        );
        assert_eq!(of(json!({"gmsaCredentialSpec": ""})).len(), 1);
        assert_eq!(of(json!({"gmsaCredentialSpec": "x".repeat(MAX_CREDENTIALS + 1)})).len(), 1);
    }
}
