"""Tests that `make test` leaves to `make test-long`; CI runs both.

Most take 4 s or more on a slow day of the machine that they were timed on: they
compile what a shorter test compiles too, start clusters, or kill programs again
and again. The others, of 1 to 3 s, go through methods that share their rounds
with one that is tested by `make test`, which keeps at least one test of each
file, but for those with '*'.
"""

ALL = '*'
# Names by file; a name without parameters stands for all of them.
LONG_TESTS = {
    'algorithms/agg_itd_test.py': ('test_epochs_equal_numpy[lfedinn]',),
    'algorithms/composition_test.py': (
        'test_epoch_of_nested_variables[lfednest]',
        'test_epoch_of_nested_variables[lfednest_nonalt]',
        'test_epoch_of_nested_variables[fedavg_s]',
        'test_single_processes_have_single_rounds',
    ),
    'algorithms/constraints_test.py': tuple(
        f'test_every_method_projects_each_step_in_both_executors[{method}]'
        for method in ('fednest_sgd', 'lfednest_svrg', 'lfednest_nonalt')
    ),
    'algorithms/fed_mbo_test.py': (
        'test_variance_falls_with_the_number_of_chains',
    ),
    'algorithms/fed_nest_test.py': (
        'test_fednest_alone_reaches_the_solution_when_clients_differ',
        'test_all_methods_agree_when_clients_do_not_differ',
    ),
    'algorithms/hparams_test.py': tuple(
        f'test_other_numbers_give_the_same_bits_as_a_new_process[{method}]'
        for method in (
            'fednest_sgd', 'lfednest_svrg', 'lfednest_nonalt', 'fedavg_s',
            'shrofbo', 'fedmbo', 'fedbioacc', 'fedmsa', 'penalty',
        )
    ),
    'algorithms/later_methods_test.py': (
        'test_compressed[fedbioacc]',
        'test_private_and_robust[shrofbo]',
        'test_private_and_robust[fedbioacc]',
        'test_private_and_robust[fedmbo]',
        'test_private_and_robust[aggitd]',
        'test_stopped_runs_go_on[fedbioacc]',
        'test_stopped_runs_go_on[fedmbo]',
        'test_stopped_runs_go_on[aggitd]',
        'test_stopped_runs_go_on[fedmsa]',
        'test_private_and_robust[fedmsa]',
        'test_private_and_robust[personal]',
    ),
    'chaos/chaos_test.py': (
        'test_bad_flags',
        'test_damaged_files_signals_and_kills',
        'test_campaign_sees_a_difference',
    ),
    'examples_test.py': (
        'test_by_its_short_name_with_another_method',
        'test_other_binaries[compositional-flags1]',
        'test_it_solves_the_problem',
        'test_killed_and_started_again_it_ends_in_the_same_bytes',
    ),
    'experiments/bad_input_test.py': (
        'test_one_method_diverges_and_the_other_goes_on',
    ),
    'experiments/benchmark_test.py': (ALL,),
    'experiments/binaries_test.py': (
        'test_binary[loss_tuning]',
        'test_binary[fed_avg]',
        'test_binary[no_tuning]',
        'test_binary[class_weights]',
        'test_binary[centralised]',
        'test_binary[sine]',
        'test_binary[cnn_shards]',
        'test_binary[mlp]',
        'test_binary[portfolio]',
        'test_later_methods',
        'test_several_methods_and_seeds',
        'test_saddle_converges_to_the_closed_form',
    ),
    'experiments/closed_form_test.py': (
        'test_fednest_goes_to_a_saddle_point_away_from_zero',
        'test_fednest_solves_the_portfolio_and_lfednest_does_not',
    ),
    'experiments/compare_test.py': (
        'test_a_comparison',
        'test_titles_tell_what_was_chosen',
    ),
    'experiments/contests_test.py': (
        'test_fednest_has_more_rounds_with_five_terms',
        'test_steps_fall_in_the_second_half_of_the_rounds',
        'test_variants_have_their_settings_and_fall_likewise',
    ),
    'experiments/floor_sim_fbo_test.py': ('test_two_epochs_equal_the_library',),
    'experiments/floor_test.py': (
        'test_the_floor_is_the_library_on_the_same_minibatches',
    ),
    'experiments/learning_problems_test.py': (
        'test_digits_are_learnt_with_convolutions',
    ),
    'experiments/logistic_regression_test.py': (
        'test_with_several_only_fed_out_reaches_the_optimum',
    ),
    'experiments/personalization_test.py': (
        'test_binary',
        'test_fed_recon_reconstructs_heads_and_steps_on_the_backbone',
    ),
    'experiments/reproduce_test.py': ('test_a_figure_from_runs_to_claims',),
    'experiments/resume_test.py': (
        'test_signals_save_the_state',
        'test_more_epochs_go_on',
        'test_killed_at_random_moments',
        'test_several_runs_killed_at_random_moments',
        'test_damaged_checkpoint_and_full_disk',
        'test_killed_while_writing',
    ),
    'experiments/robust_regression_test.py': (
        'test_the_worst_client_is_better_off_than_by_plain_regression',
    ),
    'experiments/sine_meta_learning_test.py': (
        'test_training_lowers_the_loss_after_adaptation',
        'test_an_epoch_is_a_step_along_the_gradient_of_maml',
    ),
    'experiments/signals_test.py': (
        'test_in_every_phase[flags-2-1]',
        'test_old_run_comes_back',
    ),
    'experiments/theory_test.py': (
        'test_bilevel_epochs_are_those_of_their_k',
        'test_truncated_bias_is_that_of_the_sum',
        'test_bounds_hold_and_conjugate_gradient_is_better',
        'test_mean_of_calls_on_single_examples_is_exact',
        'test_variance_in_closed_form_is_that_of_all_calls',
        'test_figure_and_claims',
        'test_slopes_of_single_level_problems',
        'test_fed_inn_is_linear_and_fed_avg_stops_at_its_fixed_point',
    ),
    'federated/aggregation_test.py': ('test_robust_private_and_compressed',),
    'local/local_hypergradient_test.py': (
        'test_declaring_the_representation_changes_no_result[minimax]',
        'test_local_hypergradient_by_a_long_series',
        'test_declaring_the_representation_changes_no_result[bilevel]',
    ),
    'local/simultaneous_test.py': (
        'test_one_pass_over_each_loss_gives_all_parts',
    ),
    'models/problem_test.py': (
        'test_weights_go_back_into_the_models_and_into_tff',
        'test_an_epoch',
        'test_derivatives_with_functional_models',
    ),
    'notebook_test.py': (ALL,),
    'readme_test.py': (
        'test_from_a_problem_to_a_figure',
        'test_keras_and_other_processes',
        'test_differential_privacy',
    ),
    'runtime/asynchronous_test.py': ('test_training_program',),
    'runtime/check_test.py': ('test_report_of_this_machine',),
    'runtime/compiler/readings_test.py': (
        'test_results_of_datasets_that_are_gone_do_not_count',
    ),
    'runtime/compiler/repeats_test.py': (
        'test_epochs[truncated-vectorised]',
        'test_epochs[cg-vectorised]',
        'test_epochs[truncated-looped]',
        'test_epochs[stochastic-vectorised]',
        'test_epochs[stochastic-unrolled]',
    ),
    'runtime/driver_test.py': (
        'test_declared_representation_changes_nothing',
        'test_every_method_equals_next[lfednest_nonalt]',
        'test_every_method_equals_next[fedbioacc]',
        'test_every_method_equals_next[fedmbo]',
    ),
    'runtime/gpu_kernels_test.py': tuple(
        f'test_epochs_run_on_a_gpu[{method}]'
        for method in (
            'lfednest', 'fednest_sgd', 'lfednest_svrg', 'lfednest_nonalt',
            'fedavg_s', 'shrofbo', 'fedmsa', 'fedbioacc', 'aggitd', 'fedmbo',
            'penalty', 'personal', 'fednest',
        )
    ),
    'runtime/in_process_test.py': (
        'test_equal_processes_share_a_compiled_function',
        'test_learning_algorithms',
        'test_aggregators_of_learning_algorithms',
        'test_k_means_and_a_preprocessed_process',
        'test_errors_name_the_quantity_and_leave_the_runtime_usable',
        'test_ten_epochs_of_fednest_equal_the_native_ones',
        'test_runs_that_are_over_leave_nothing_behind',
        'test_clients_are_spread_over_two_devices',
    ),
    'runtime/native_runtime_test.py': (
        'test_worker_ends_with_its_parent_and_holds_no_pipe',
        'test_call_timeout',
    ),
    'runtime/ray_test.py': (ALL,),
    'runtime/secure_aggregation_test.py': (ALL,),
    'runtime/step_by_step_test.py': (
        'test_epochs_equal_those_of_the_compiled_function',
    ),
    'runtime/vectorised_test.py': (
        'test_numbers_of_methods[fednest]',
        'test_numbers_of_methods[lfednest]',
        'test_numbers_of_methods[fedmbo]',
        'test_numbers_of_methods[personal]',
        'test_numbers_by_chunks',
    ),
    'simulation/client_work_test.py': (
        'test_random_work_of_tuned_runs_is_counted_for_longer',
        'test_random_work_is_counted_for_longer',
    ),
    'simulation/comparison_test.py': (
        'test_a_line_tells_how_each_trial_and_each_run_ended',
        'test_an_entry_may_have_steps_of_its_own',
        'test_fewer_rounds_than_an_epoch_are_refused',
        'test_a_damaged_reason_is_named',
        'test_other_data_are_refused',
        'test_a_page_before_all_methods_are_done',
        'test_work_is_counted_on_clients_of_the_final_runs',
        'test_damaged_rows_of_a_diverged_run_are_named',
        'test_every_method_has_as_many_trials',
        'test_the_ablation_keeps_v_at_zero',
        'test_tables_have_the_runs_numbers',
        'test_run_again_it_reads_what_is_there',
        'test_other_tuning_is_refused',
        'test_killed_in_a_trial_it_ends_like_one_that_was_not',
        'test_settings_are_in_the_directory',
        'test_a_trial_counts_with_the_mean_over_its_seeds',
        'test_killed_on_the_second_seed_a_trial_ends_like_one_that_was_not',
        'test_a_trial_that_diverges_on_its_second_seed_diverged',
        'test_a_distance_that_grows_without_bound_diverged',
    ),
    'types_test.py': (ALL,),
}


def is_long(path: str, name: str) -> bool:
  """Whether a test is one of them.

  Args:
    path: Of its file, below `tests`.
    name: Of the test, with its parameters.
  """
  found = LONG_TESTS.get(path, ())
  return ALL in found or name in found or name.partition('[')[0] in found
