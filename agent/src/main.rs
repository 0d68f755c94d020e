//! The `coracle` binary: one program with a subcommand per role.

mod allocator;
#[cfg(all(target_arch = "x86_64", any(test, all(target_env = "musl", not(debug_assertions)))))]
mod byte_functions;
mod directories;
mod lock;
mod role;
mod settings;
mod terminal;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

#[cfg(feature = "controlplane")]
use crate::settings::ControlPlaneSettings;
use crate::settings::{
    AllFlags, FeatureSettings, Flags, LogSettings, NodeSettings, PathSettings, RuntimeSettings, Settings,
};

#[global_allocator]
static ALLOCATOR: allocator::RoleAllocator = allocator::RoleAllocator;

/// A Kubernetes node in one binary, with a thin control plane.
#[derive(Parser)]
#[command(name = "coracle", version, max_term_width = 100, disable_help_subcommand = true)]
struct CommandLine {
    #[command(flatten)]
    log: Flags<LogSettings>,
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
#[cfg_attr(
    not(feature = "controlplane"),
    expect(clippy::large_enum_variant, reason = "one value in the whole process")
)]
enum Role {
    /// Run a cluster on this machine: control plane and node in one process, without configuration.
    ///
    /// For kubectl: `export KUBECONFIG=/var/lib/coracle/admin.kubeconfig`. Ctrl-C stops both but not the pods. The next
    /// start takes them over; `coracle down` removes them.
    #[cfg(feature = "controlplane")]
    Up {
        #[command(flatten)]
        paths: Flags<PathSettings>,
        #[command(flatten)]
        features: Flags<FeatureSettings>,
        #[command(flatten)]
        node: Flags<NodeSettings>,
        #[command(flatten)]
        plane: Flags<ControlPlaneSettings>,
    },
    /// Run a node for a control plane on another machine.
    ///
    /// The first start needs --join; `coracle token create` on the control plane prints the command. Later starts need
    /// no flags.
    Agent {
        #[command(flatten)]
        connection: role::agent::ControlPlaneConnection,
        #[command(flatten)]
        paths: Flags<PathSettings>,
        #[command(flatten)]
        features: Flags<FeatureSettings>,
        #[command(flatten)]
        node: Flags<NodeSettings>,
    },
    /// Run the control plane: API server, controllers, scheduler and store.
    #[cfg(feature = "controlplane")]
    Controlplane {
        #[command(flatten)]
        paths: Flags<PathSettings>,
        #[command(flatten)]
        features: Flags<FeatureSettings>,
        #[command(flatten)]
        plane: Flags<ControlPlaneSettings>,
        /// Also write credentials for an agent with this name on this machine, and print its command.
        #[arg(long, value_name = "NAME")]
        issue_node: Option<String>,
        #[command(flatten)]
        external: role::controlplane::External,
    },
    /// Create, list and delete bootstrap tokens for machines that join.
    #[cfg(feature = "controlplane")]
    Token(role::token::Arguments),
    /// Write a consistent copy of the cluster's objects to a file, while the control plane runs or is stopped.
    #[cfg(feature = "controlplane")]
    Backup(role::backup::BackupArguments),
    /// Replace the objects of a stopped control plane with those of a backup.
    #[cfg(feature = "controlplane")]
    Restore(role::backup::RestoreArguments),
    /// Create, list and delete local clusters for development and tests. Each node has its own network namespace.
    #[cfg(feature = "controlplane")]
    Cluster(role::cluster::Arguments),
    /// Serve the container runtime interface (CRI v1) without a node, for crictl, critest or a kubelet.
    Runtime(Flags<RuntimeSettings>),
    /// Pull, import, export, list and remove container images.
    Image(role::image::Arguments),
    /// Run as a network plugin (CNI) for any runtime, or install the plugins.
    Cni(role::cni::Arguments),
    /// Report missing features of this machine and their consequences.
    Check(role::check::Arguments),
    /// Stop the cluster on this machine, and remove all its pods, interfaces, mounts and cgroups.
    Down(role::down::Arguments),
    /// Print the completions of a shell.
    Completion(role::command_line::CompletionArguments),
    /// Write the man pages to a directory.
    Man(role::command_line::ManArguments),
    /// Print the version.
    Version,
    /// Hold the containers of one pod. Started by the node only.
    #[command(hide = true)]
    Shim {
        #[arg(long)]
        dir: std::path::PathBuf,
    },
}

fn main() -> ExitCode {
    allocator::choose();
    // The shim starts before any thread, because it forks, and a fork of a process with threads may hang. It starts
    // before the command line is parsed, because the parser's memory would stay dirty in each shim.
    if let Some(dir) = shim_dir() {
        return coracle_shim::main(coracle_shim::ShimArgs { dir });
    }
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|word| word == coracle_agent::volume::nfs::MOUNT_COMMAND) {
        return coracle_agent::volume::nfs::mount_main(words);
    }
    if let Err(error) = coracle_open_files::mark_inherited_close_on_exec() {
        return role::fail(
            &anyhow::Error::new(error).context("cannot mark inherited descriptors as close-on-exec"),
        );
    }
    if let Some(plugin) = role::cni::called_as() {
        return coracle_cni::plugin_main(plugin);
    }
    let command = CommandLine::parse();
    match run(command.role, command.log) {
        Ok(code) => code,
        Err(error) => role::fail(&error),
    }
}

/// The directory in `shim --dir DIR`, the command line of a shim.
fn shim_dir() -> Option<std::path::PathBuf> {
    let mut words = std::env::args_os().skip(1);
    let is_shim = words.next()? == "shim" && words.next()? == "--dir";
    words.next().filter(|_| is_shim).map(Into::into)
}

/// Whether the role starts shims.
fn starts_pods(role: &Role) -> bool {
    match role {
        #[cfg(feature = "controlplane")]
        Role::Up { .. } => true,
        Role::Agent { .. } | Role::Runtime(_) => true,
        _ => false,
    }
}

fn run(role: Role, log: Flags<LogSettings>) -> anyhow::Result<ExitCode> {
    let writes_for_its_user = match role {
        #[cfg(feature = "controlplane")]
        Role::Token(_) => true,
        Role::Image(_) => true,
        _ => false,
    };
    if !writes_for_its_user {
        directories::set_umask();
    }
    if starts_pods(&role) {
        // A kernel without support for keys has no session keyring.
        let _absent = coracle_shim::leave_session_keyring();
    }
    match role {
        #[cfg(feature = "controlplane")]
        Role::Up { paths, features, node, plane } => {
            let flags = AllFlags { log, paths, features, node, plane };
            role::block_on(role::up::run(Settings::load(flags)?))
        }
        Role::Agent { connection, paths, features, node } => {
            let settings = Settings::load(AllFlags { log, paths, features, node, ..AllFlags::default() })?;
            role::block_on(role::agent::run(settings, connection))
        }
        #[cfg(feature = "controlplane")]
        Role::Controlplane { paths, features, plane, issue_node, external } => {
            let settings = Settings::load(AllFlags { log, paths, features, plane, ..AllFlags::default() })?;
            if external.kubeconfig.is_some() {
                return role::block_on(role::controlplane::run_for(settings, external));
            }
            role::block_on(role::controlplane::run(settings, issue_node))
        }
        #[cfg(feature = "controlplane")]
        Role::Token(arguments) => role::block_on(role::token::run(arguments, log)),
        #[cfg(feature = "controlplane")]
        Role::Backup(arguments) => role::block_on(role::backup::backup(arguments, log)),
        #[cfg(feature = "controlplane")]
        Role::Restore(arguments) => role::backup::restore(arguments, log).map(|()| ExitCode::SUCCESS),
        #[cfg(feature = "controlplane")]
        Role::Cluster(arguments) => {
            settings::start_log(&log)?;
            role::block_on(role::cluster::run(arguments))
        }
        Role::Runtime(flags) => role::block_on(role::runtime::run(RuntimeSettings::load(&log, &flags)?)),
        Role::Image(arguments) => role::block_on(role::image::run(arguments, log)),
        Role::Cni(arguments) => {
            settings::start_log(&log)?;
            role::cni::run(&arguments)
        }
        Role::Check(arguments) => role::check::run(arguments, log),
        Role::Down(arguments) => role::block_on(role::down::run(arguments, log)),
        Role::Completion(arguments) => role::command_line::completion(&arguments, &CommandLine::command()),
        Role::Man(arguments) => role::command_line::man(&arguments, &CommandLine::command()),
        Role::Version => role::version(),
        Role::Shim { dir } => Ok(coracle_shim::main(coracle_shim::ShimArgs { dir })),
    }
}
