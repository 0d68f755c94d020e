//! Command, environment and working directory of a container. Pure.

use std::collections::HashMap;

use coracle_images::Image;
use coracle_proto::cri::ContainerConfig;

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const TERMINAL: &str = "TERM=xterm";

/// Variables in their order, each key once. A key is found in constant time: an image or a pod can have very many.
#[derive(Default)]
struct Environment {
    entries: Vec<String>,
    indices: HashMap<String, usize>,
}

/// The command line. The configuration's command replaces the image's entrypoint and arguments; the configuration's
/// arguments replace the image's arguments. Empty if neither has one.
pub(super) fn args(config: &ContainerConfig, image: &Image) -> Vec<String> {
    let (command, args) = match (config.command.is_empty(), config.args.is_empty()) {
        (false, _) => (config.command.as_slice(), config.args.as_slice()),
        (true, false) => (image.entrypoint(), config.args.as_slice()),
        (true, true) => (image.entrypoint(), image.cmd()),
    };
    // Some builders write one empty string for an absent entrypoint.
    let command = if command == [String::new()] { &[] } else { command };
    command.iter().chain(args).cloned().collect()
}

/// The environment: of the image, then of the configuration, with a search path in every case.
pub(super) fn env(config: &ContainerConfig, image: &Image, hostname: &str) -> Vec<String> {
    let mut env = Environment::default();
    if config.tty {
        env.put(TERMINAL.to_owned());
    }
    if !hostname.is_empty() {
        env.put(format!("HOSTNAME={hostname}"));
    }
    for entry in image.env() {
        env.put(entry.clone());
    }
    for entry in &config.envs {
        env.put(format!("{}={}", entry.key, String::from_utf8_lossy(&entry.value)));
    }
    let mut env = env.entries;
    if !env.iter().any(|entry| entry.starts_with("PATH=")) {
        env.push(PATH.to_owned());
    }
    env
}

/// Sets the terminal type, unless it is set.
pub(crate) fn name_terminal(env: &mut Vec<String>) {
    if !env.iter().any(|entry| entry.starts_with("TERM=")) {
        env.push(TERMINAL.to_owned());
    }
}

/// The working directory; the root directory by default.
pub(super) fn cwd(config: &ContainerConfig, image: &Image) -> String {
    [config.working_dir.as_str(), image.working_dir()]
        .into_iter()
        .find(|dir| !dir.is_empty())
        .map_or_else(|| "/".to_owned(), absolute)
}

fn absolute(dir: &str) -> String {
    if dir.starts_with('/') { dir.to_owned() } else { format!("/{dir}") }
}

// === impl Environment ===

impl Environment {
    /// Adds an entry, or replaces the entry with the same key.
    fn put(&mut self, entry: String) {
        let key = entry.split('=').next().unwrap_or_default();
        match self.indices.get(key) {
            Some(index) => self.entries[*index] = entry,
            None => {
                self.indices.insert(key.to_owned(), self.entries.len());
                self.entries.push(entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::oci_spec::sample::image;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn command_and_arguments_replace_the_image_as_in_kubernetes() {
        let image = image(&["entry"], &["default"], &[]);
        let cases: [(&[&str], &[&str], &[&str]); 4] = [
            (&[], &[], &["entry", "default"]),
            (&[], &["mine"], &["entry", "mine"]),
            (&["run"], &[], &["run"]),
            (&["run"], &["mine"], &["run", "mine"]),
        ];
        for (command, arguments, expected) in cases {
            let config =
                ContainerConfig { command: strings(command), args: strings(arguments), ..Default::default() };
            assert_eq!(args(&config, &image), strings(expected));
        }
    }

    #[test]
    fn the_config_overrides_the_images_environment_in_place() {
        let image = image(&[], &[], &["A=1", "PATH=/bin"]);
        let value = coracle_proto::cri::KeyValue { key: "A".into(), value: b"2=x".to_vec() };
        let config = ContainerConfig { envs: vec![value], ..Default::default() };
        assert_eq!(env(&config, &image, "h"), strings(&["HOSTNAME=h", "A=2=x", "PATH=/bin"]));
    }

    #[test]
    fn very_many_variables_take_linear_time() {
        let variable = |number: u32| coracle_proto::cri::KeyValue {
            key: format!("V{number}"),
            value: number.to_string().into(),
        };
        let envs = (0..200_000).chain(0..200_000).map(variable).collect();
        let config = ContainerConfig { envs, ..Default::default() };
        let env = env(&config, &image(&[], &[], &[]), "");
        assert_eq!((env.len(), env[1].as_str()), (200_001, "V1=1"));
    }

    #[test]
    fn a_terminal_has_a_name() {
        let mut env = strings(&["PATH=/bin"]);
        name_terminal(&mut env);
        assert_eq!(env, strings(&["PATH=/bin", "TERM=xterm"]));
        let mut env = strings(&["TERM=vt100"]);
        name_terminal(&mut env);
        assert_eq!(env, strings(&["TERM=vt100"]));
    }

    #[test]
    fn a_search_path_is_always_set() {
        assert_eq!(env(&ContainerConfig::default(), &image(&[], &[], &[]), ""), [PATH]);
    }
}
