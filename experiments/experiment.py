"""An experiment: its problems, its methods, and its settings with defaults."""

import collections
from collections.abc import Callable
from typing import NamedTuple

from experiments import settings as settings_lib
from experiments.settings import Flags, Settings
from fednest_tff import options as options_lib
from fednest_tff import registry, simulation


class Baseline(NamedTuple):
  """A method that one experiment has besides those of the registry.

  Attributes:
    label: Its name in plots and tables.
    options: Those of the methods' options that it uses.
  """

  label: str
  options: frozenset[str]


class Experiment(NamedTuple):
  """An experiment binary.

  Attributes:
    name: Of the module.
    title: For people.
    defaults: Its flags, besides the common ones, and their defaults; also
      defaults of the methods' options that suit it.
    make_trial: From settings and a seed to a trial.
    curve: From settings to the curve of the plot.
    variants: Further flags for each value of `--problem`, if it has several.
    without: Options of methods that have no effect on its problems.
    baselines: Methods of its own, by name.
    presets: Defaults that go together, by the value of `--preset`; the first
      is what runs without the flag.
  """

  name: str
  title: str
  defaults: Flags
  make_trial: Callable[[Settings, int], simulation.Trial]
  curve: Callable[[Settings], simulation.Curve]
  variants: dict[str, Flags] = {}
  without: frozenset[str] = frozenset()
  baselines: dict[str, Baseline] = {}
  presets: dict[str, Flags] = {}

  def _preset(self, name: str | None) -> Flags:
    """The defaults of a preset, and its name; none if there are no presets."""
    if not self.presets:
      return {}
    name = name or next(iter(self.presets))
    if name not in self.presets:
      raise settings_lib.SettingsError(
          f'--preset={name} is none of {", ".join(self.presets)}'
      )
    return self.presets[name] | {'preset': name}

  def _own_defaults(self, methods: list[str], given: Flags) -> Flags:
    """Defaults that methods from elsewhere keep, by method and option.

    The defaults of experiments were chosen for the methods of this library.
    """
    found = {
        method: {
            option: default
            for option, default in self._options_of(method).items()
            if default is not None and option not in given
        }
        for method in methods
        if method not in self.baselines
        and not registry.get_method(method).is_built_in
    }
    return found

  def resolve(self, given: Flags) -> Settings:
    """All settings, from those that were chosen."""
    defaults = dict(self.defaults)
    name = self.name
    if self.variants:
      problem = given.get('problem', defaults['problem'])
      if problem not in self.variants:
        raise settings_lib.SettingsError(
            f'--problem={problem} is none of {", ".join(self.variants)}'
        )
      defaults |= self.variants[problem]
      name = f'{name} --problem={problem}'
    methods = {**settings_lib.COMMON, **defaults, **given}['method']
    self._check_methods(methods)
    defaults |= self._preset(given.get('preset'))
    wanted = self._options(methods)
    every = self._options(self.methods())
    plain = {
        key: default for key, default in defaults.items()
        if key not in settings_lib.METHOD_FLAGS
    }
    if given.keys() & every.keys() - wanted.keys():
      name = f'{name} --method={",".join(methods)}'
    own = self._own_defaults(methods, given)
    kept = set()
    if len(own) == len(methods):  # Nobody needs the experiment's defaults.
      kept = settings_lib.METHOD_FLAGS.intersection(*own.values())
    wanted = {
        key: value if key in kept else defaults.get(key, value)
        for key, value in wanted.items()
    }
    settings = settings_lib.resolve(name, plain | wanted, given)
    differ = {
        method: {key: v for key, v in options.items() if wanted[key] != v}
        for method, options in own.items()
    }
    if any(differ.values()):
      settings.own_defaults = differ
    return settings

  def _options(self, methods: list[str]) -> Flags:
    """The options of methods that have an effect here, with their defaults.

    The default is `None` where the methods' defaults differ: each method then
    takes its own.
    """
    found: Flags = {}
    for method in methods:
      for name, default in self._options_of(method).items():
        if found.setdefault(name, default) != default:
          found[name] = None
    return found

  def _options_of(self, method: str) -> Flags:
    if method in self.baselines:
      return dict.fromkeys(self.baselines[method].options)
    return {
        option.name: (
            None if option.default is options_lib.REQUIRED else option.default
        )
        for option in settings_lib.method_options(method).values()
        if option.name not in self.without
    }

  def _check_methods(self, methods: list[str]) -> None:
    if not methods:
      raise settings_lib.SettingsError(
          f'--method is empty; choose from {", ".join(self.methods())}'
      )
    for method in methods:
      if method in self.baselines:
        continue
      try:
        registry.get_method(method)
      except ValueError as error:
        raise settings_lib.SettingsError(
            f'--method={method} is none of {", ".join(self.methods())}; one'
            ' of your own is package.module:builder'
            if ':' not in method else str(error)
        ) from error
    if len(set(methods)) != len(methods):
      raise settings_lib.SettingsError('--method names a method twice')

  def methods(self) -> list[str]:
    """The names of all methods that it can run."""
    return [*registry.method_names(), *self.baselines]

  def labels(self, methods: list[str]) -> dict[str, str]:
    """The methods' names in plots and tables, no two of them equal."""
    found = {
        method: (
            self.baselines[method].label if method in self.baselines
            else registry.get_method(method).label
        )
        for method in methods
    }
    counts = collections.Counter(found.values())
    return {
        method: label if counts[label] == 1 else method
        for method, label in found.items()
    }

  def flags(self) -> dict[str, dict[str | None, object]]:
    """All flags that it may have: the default of each, by `--problem`.

    An experiment with one problem has the key `None` in place of its name.
    """
    options = self._options(self.methods())
    found: dict[str, dict[str | None, object]] = collections.defaultdict(dict)
    problems: list[str | None] = [*self.variants] or [None]
    for problem in problems:
      variant = {} if problem is None else self.variants[problem]
      every = settings_lib.COMMON | options | self.defaults
      every |= self._preset(None) | variant
      for kept in self._own_defaults(self.methods(), {}).values():
        for name, default in kept.items():
          if every[name] != default:
            every[name] = None  # There is no common one.
      for name, default in every.items():
        found[name][problem] = default
    return dict(found)
