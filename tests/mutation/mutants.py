"""Planted faults in muon_core, each with the tests that must notice it.

A mutant is one replacement in one file. Its killers are the tests that say what it breaks; `run.py` runs these alone.
"""

from dataclasses import dataclass

UNIT = "tests/unit/muon_core/"
REAL = "tests/distributed/"


@dataclass(frozen=True)
class Mutant:
    """One fault: what it is, where, and which tests kill it."""

    fault: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]


def _mutants(file: str, tests: str, *faults: tuple[str, str, str, str]) -> list[Mutant]:
    return [Mutant(fault, file, old, new, (tests + killer,)) for fault, old, new, killer in faults]


NEWTON_SCHULZ = _mutants(
    "newton_schulz.py",
    UNIT + "test_newton_schulz.py::",
    ("a coefficient has the wrong sign", "-4.7750", "4.7750", "test_singular_values_fall_into_the_quintics_band"),
    (
        "magnitudes are not taken out first",
        "scaled_BL = flat_BL / largest_B1.clamp(min=torch.finfo(torch.float32).tiny)",
        "scaled_BL = flat_BL.clone()",
        "test_extreme_inputs_give_what_one_gives",
    ),
    (
        "the matrix is not normalized",
        "scaled_BL.div_(norm_B1.clamp(min=torch.finfo(torch.float32).tiny))",
        "scaled_BL",
        "test_every_method_equals_the_float64_reference",
    ),
    (
        "the missing transpose at the end",
        "x_Bnm.mT if is_tall else x_Bnm).to",
        "x_Bnm.reshape(x_Bnm.mT.shape) if is_tall else x_Bnm).to",
        "test_a_transposed_matrix_gives_the_transposed_result",
    ),
    (
        "the caller's matrix is scaled in place",
        "scaled_BL = flat_BL / largest_B1",
        "scaled_BL = flat_BL.div_(largest_B1)  / largest_B1",
        "test_the_callers_tensor_is_untouched",
    ),
    (
        "Gram keeps its product over the restart",
        "            product_Bnn = None\n        tail_Bnn",
        "        tail_Bnn",
        "test_the_gram_method_restarts_after_three",
    ),
    (
        "Polar Express repeats its first step",
        "POLAR_EXPRESS[min(step, last)]",
        "POLAR_EXPRESS[0]",
        "test_polar_express_comes_closer_to_the_polar_factor",
    ),
    (
        "one bad matrix spoils its whole batch",
        "flat_BL.abs().amax(dim=1, keepdim=True)",
        "flat_BL.abs().amax()",
        "test_a_nonfinite_entry_spoils_its_own_matrix_only",
    ),
    (
        "zero is divided by zero",
        "largest_B1.clamp(min=torch.finfo(torch.float32).tiny)",
        "largest_B1",
        "test_zero_stays_zero_and_empty_stays_empty",
    ),
    (
        "the iteration rounds to bfloat16",
        "iteration_dtype or default_iteration_dtype(matrix.device)",
        "torch.bfloat16",
        "test_every_method_equals_the_float64_reference",
    ),
)

LARGE_MATRICES = _mutants(
    "large_matrices.py",
    UNIT + "test_large_matrices.py::",
    (
        "one half is copied, not mirrored",
        "out[upper, lower].copy_(below.mT)",
        "out[upper, lower].copy_(below[: half, : n - half].reshape(half, n - half))",
        "test_a_symmetric_product_is_right_and_mirrored",
    ),
    (
        "the Gram form of a large matrix never restarts",
        "GRAM_RESTART_AFTER: Final = 3",
        "GRAM_RESTART_AFTER: Final = 9",
        "test_large_matrices_equal_the_float64_reference",
    ),
    (
        "the square of a large matrix has the other factor",
        "symmetric_product_(gram, gram, out, alpha=c, c=gram, beta=b)",
        "symmetric_product_(gram, gram, out, alpha=b, c=gram, beta=b)",
        "test_large_matrices_equal_the_float64_reference",
    ),
    (
        "a tall matrix is taken as it lies",
        "self._is_tall = rows > cols",
        "self._is_tall = False",
        "test_large_matrices_equal_the_float64_reference",
    ),
)

MUON = _mutants(
    "muon.py",
    UNIT + "test_muon.py::",
    (
        "Nesterov is one step off",
        "gradient.lerp_(momentum_buffer, momentum) if",
        "gradient.lerp_(momentum_buffer, momentum * momentum) if",
        "test_five_steps_equal_the_float64_reference",
    ),
    ("Nesterov is inverted", "if nesterov else", "if not nesterov else", "test_five_steps_equal_the_float64_reference"),
    (
        "momentum weighs the gradient",
        "momentum_buffer.lerp_(gradient, 1 - momentum)",
        "momentum_buffer.lerp_(gradient, momentum)",
        "test_five_steps_equal_the_float64_reference",
    ),
    (
        "the aspect scale is left out",
        "if shape.aspect_scale != 1.0:",
        "if shape.aspect_scale < 1.0:",
        "test_five_steps_equal_the_float64_reference",
    ),
    (
        "weight decay forgets the learning rate",
        "weight.mul_(1 - lr * weight_decay)",
        "weight.mul_(1 - weight_decay)",
        "test_five_steps_equal_the_float64_reference",
    ),
    ("the step goes uphill", "alpha=-lr", "alpha=lr", "test_five_steps_equal_the_float64_reference"),
    (
        "the caller's gradient is consumed",
        "parameter.grad.clone(memory_format=torch.contiguous_format)",
        "parameter.grad",
        "test_the_callers_gradient_is_untouched",
    ),
    (
        "batches mix shapes",
        "by_shape.setdefault((shape.rows, shape.cols), [])",
        "by_shape.setdefault((24, 24), [])",
        "test_batches_hold_equal_shapes_and_stay_within_the_limit",
    ),
    (
        "batches have no limit",
        "if batch and elements + shapes[position].numel > max_elements:",
        "if batch and elements < 0:",
        "test_batches_hold_equal_shapes_and_stay_within_the_limit",
    ),
    (
        "AdamW counts a step too many",
        '[state["step"]],',
        '[state["step"] + 1],',
        "test_adamw_equals_torchs_to_the_last_bit_on_a_flat_partition",
    ),
    (
        "AdamW swaps its betas",
        "beta1, beta2 = group",
        "beta2, beta1 = group",
        "test_adamw_equals_the_float64_reference",
    ),
)

PARAMETERS = _mutants(
    "parameters.py",
    UNIT + "test_parameters.py::",
    (
        "the scale comes from the wrong dimensions",
        "self.rows / self.cols",
        "self.cols / self.rows",
        "test_a_tall_convolution_is_scaled_by_rows_and_flattened_columns",
    ),
    (
        "num_heads is stale: a neighbour's",
        "num_heads = getattr(parameter, NUM_HEADS_ATTRIBUTE, None)",
        'num_heads = nn.heads = getattr(parameter, NUM_HEADS_ATTRIBUTE, getattr(nn, "heads", None))',
        "test_heads_are_read_from_each_parameter_and_never_a_neighbour",
    ),
    (
        "heads are orthogonalized together",
        "MatrixShape(num_heads, shape[0] // num_heads, shape[1])",
        "MatrixShape(1, shape[0], shape[1])",
        "test_each_head_is_orthogonalized_on_its_own",
    ),
    (
        "fused parts are orthogonalized together",
        "if not self.row_splits:",
        "if self.batch:",
        "test_fused_parts_are_orthogonalized_each_on_its_own",
    ),
    (
        "a 1-D convolution is taken for experts",
        "if len(shape) == 3 and not is_convolution:",
        "if len(shape) == 3:",
        "test_each_shape_is_viewed_as_the_matrices_it_holds",
    ),
    (
        "experts are flattened into one matrix",
        "if len(shape) == 3 and not is_convolution:",
        "if len(shape) == 7:",
        "test_each_shape_is_viewed_as_the_matrices_it_holds",
    ),
    (
        "a convolution is flattened at the wrong place",
        "MatrixShape(1, shape[0], math.prod(shape[1:]))",
        "MatrixShape(1, shape[0] * shape[1], math.prod(shape[2:]))",
        "test_a_convolution_is_updated_as_its_flattened_matrix",
    ),
    (
        "embeddings go to Muon",
        "isinstance(module, nn.Embedding | nn.EmbeddingBag)",
        "isinstance(module, nn.EmbeddingBag)",
        "test_each_kind_goes_where_it_belongs_and_says_why",
    ),
    (
        "AdamW's patterns are ignored",
        "for pattern in adamw:",
        "for pattern in ():",
        "test_name_patterns_override_the_rules",
    ),
    (
        "no Muon parameter at all passes in silence",
        'if not any(entry.route == "muon" for entry in routed):',
        "if not routed:",
        "test_no_muon_parameter_at_all_is_said_loudly",
    ),
)

LAYOUT = _mutants(
    "zero/layout.py",
    UNIT + "test_layout.py::",
    (
        "a cut loses an element",
        "end = min(first + numel, (rank + 1) * partition_size)",
        "end = min(first + numel, (rank + 1) * partition_size - 1)",
        "test_a_cut_parameter_is_whole_again_in_rank_order",
    ),
    (
        "a fragment's offset is the group's, not the partition's",
        "begin - rank * partition_size))",
        "begin))",
        "test_a_cut_parameter_is_whole_again_in_rank_order",
    ),
    (
        "stage 3's last piece runs over its parameter",
        "min(piece, numel - start)",
        "piece",
        "test_even_pieces_cover_a_parameter_once",
    ),
    (
        "views look into a buffer that was replaced",
        "new is old for new, old",
        "new is not None for new, old",
        "test_cached_views_are_made_anew_only_for_a_new_buffer",
    ),
)

PLANNING = _mutants(
    "zero/exchange.py",
    UNIT + "test_layout.py::",
    (
        "one rank owns everything",
        "owner = min(range(world_size), key=lambda rank: (load[rank], -parameter.fragments[rank].numel, rank))",
        "owner = 0",
        "test_travellers_even_out_the_ranks_costs",
    ),
    (
        "what lies whole is not orthogonalized",
        "whole[holders[0]].append(position)",
        "pass",
        "test_every_parameter_is_orthogonalized_exactly_once",
    ),
    (
        "chunks have no limit",
        "if not chunks or elements + parameter.numel > bucket_elements:",
        "if not chunks:",
        "test_every_parameter_is_orthogonalized_exactly_once",
    ),
)

EXCHANGE = _mutants(
    "zero/exchange.py",
    REAL + "test_ordered.py::",
    (
        "the owner gets elements from the wrong offset",
        """                shard.narrow(0, fragment.offset, fragment.numel)
                for fragment in self._pieces([t.position for t in chunk if t.owner == rank], parameters, self.rank)
            ]
            for rank in range(self.world_size)
        ]
        # One""",
        """                shard.narrow(0, 0, fragment.numel)
                for fragment in self._pieces([t.position for t in chunk if t.owner == rank], parameters, self.rank)
            ]
            for rank in range(self.world_size)
        ]
        # One""",
        "test_stages_end_with_the_same_bits[fp32]",
    ),
    (
        "the owner puts pieces together at the wrong place",
        """                whole[position].narrow(0, fragment.start, fragment.numel)
                for position in owned
                for fragment in self._pieces([position], parameters, rank)
            ]
            for rank in range(self.world_size)
        ]
        # The""",
        """                whole[position].narrow(0, 0, fragment.numel)
                for position in owned
                for fragment in self._pieces([position], parameters, rank)
            ]
            for rank in range(self.world_size)
        ]
        # The""",
        "test_stages_end_with_the_same_bits[fp32]",
    ),
    (
        "updates come back to the wrong place",
        """                shard.narrow(0, fragment.offset, fragment.numel)
                for fragment in self._pieces([t.position for t in chunk if t.owner == rank], parameters, self.rank)
            ]
            for rank in range(self.world_size)
        ]
        return""",
        """                shard.narrow(0, 0, fragment.numel)
                for fragment in self._pieces([t.position for t in chunk if t.owner == rank], parameters, self.rank)
            ]
            for rank in range(self.world_size)
        ]
        return""",
        "test_stages_end_with_the_same_bits[fp32]",
    ),
    (
        "float16 travels without its exponent",
        "self._header = int(wire_dtype == torch.float16)",
        "self._header = 0",
        "test_a_half_precision_wire_rounds_what_travels_and_no_more[float16-0.002]",
    ),
)

OPTIMIZER = _mutants(
    "zero/optimizer.py",
    REAL,
    (
        "the wrong communication dtype",
        "engine._config.communication_data_type or torch.float32",
        "engine._config.communication_data_type or torch.bfloat16",
        "test_ordered.py::test_stages_end_with_the_same_bits[fp32]",
    ),
    (
        "the guard is removed where DeepSpeed has no check",
        "zero.check_grad_overflow = not looks_at_norm",
        "pass",
        "test_ordered.py::test_a_nonfinite_gradient_reaches_nothing_in_any_dtype",
    ),
    (
        "the guard is inverted",
        "zero.check_grad_overflow = not looks_at_norm",
        "zero.check_grad_overflow = looks_at_norm",
        "test_ordered.py::test_a_nonfinite_gradient_reaches_nothing_in_any_dtype",
    ),
    (
        "momentum before the unscale: in loss-scaled units",
        "self.clipping.muon_update(partition, flat.grad)",
        "self.clipping.muon_update(partition, flat.grad.mul_(self.partitions.zero.loss_scale))",
        "test_ordered.py::test_a_growing_loss_scale_changes_no_bit[0.0-1]",
    ),
    (
        "the reported update is the whole group's parameter",
        "norm_squared = apply_measured_update_(flat, update, lr",
        "norm_squared = torch.linalg.vector_norm(flat).square()\n        apply_measured_update_(flat, update, lr",
        "test_ordered.py::test_the_reported_norms_are_of_the_unscaled_gradient_and_the_applied_update[1]",
    ),
    (
        "a schedule counts discarded steps unasked",
        "if overflow and self.schedule_counts_discarded_steps and",
        "if overflow and",
        "test_ordered.py::test_a_learning_rate_schedule_waits_for_applied_steps[1]",
    ),
    (
        "ranks that disagree are attached",
        "if len({answer[0] for answer in said if answer is not None}) != 1:",
        "if not said:",
        "test_setups.py::test_ranks_with_different_models_are_refused_everywhere",
    ),
    (
        "DeepSpeed's own Muon may run as well",
        "        if tagged:",
        "        if not tagged and tagged:",
        "test_setups.py::test_tags_that_would_start_deepspeeds_own_muon_are_refused",
    ),
)

ORDERINGS = _mutants(
    "zero/orderings.py",
    REAL,
    (
        "ordered moves before the check",
        '"ordered": Ordered,',
        '"ordered": Master,',
        "test_ordered.py::test_a_discarded_step_changes_no_bit_of_momentum_or_weights[None-1]",
    ),
    (
        "a per-tensor guard instead of the global one",
        '"ordered": Ordered,',
        '"ordered": PerTensor,',
        "test_orderings.py::test_calm_and_boom_part_the_orderings[1]",
    ),
    (
        "Muon runs once per micro-batch",
        "    moves_per_micro_batch = False\n\n    def before_check",
        "    moves_per_micro_batch = True\n\n    def before_check",
        "test_orderings.py::test_guarded_orderings_equal_ordered_under_accumulation[precheck-3]",
    ),
    (
        "precheck asks no other rank",
        "dist.all_reduce(nonfinite, op=dist.ReduceOp.MAX, group=partitions.process_group)",
        "pass",
        "test_orderings.py::test_an_overflow_in_another_ranks_partition_holds_the_momentum_here_too[1-precheck]",
    ),
    (
        "the norm is the last micro-batch's",
        "            if earlier is not None:\n                # The last",
        "            if earlier is not None and False:\n                # The last",
        "test_orderings.py::test_the_norm_is_of_the_whole_window_although_the_momentum_moves_in_it[master]",
    ),
    (
        "deferred moves the momentum itself",
        "reduced_gradient(partition), staged, self",
        "reduced_gradient(partition), momentum, self",
        "test_orderings.py::test_guarded_orderings_equal_ordered_under_accumulation[deferred-1]",
    ),
)

PRECISION = _mutants(
    "zero/precision.py",
    REAL + "test_ordered.py::",
    (
        "the scale grows before the step is done",
        "            self._growth_waits = True\n            self._listener",
        "            self._update_scale(False)\n            self._listener",
        "test_a_growing_loss_scale_changes_no_bit[0.1-1]",
    ),
    (
        "the scale never grows",
        "            self._growth_waits = False\n            self._update_scale(False)",
        "            self._growth_waits = False",
        "test_a_growing_loss_scale_changes_no_bit[0.0-1]",
    ),
)

CLIPPING = _mutants(
    "zero/clipping.py",
    REAL + "test_clipping.py::",
    (
        "AdamW's gradients are measured and not scaled",
        "return gradient if self._factor is None else",
        "return gradient if self._scope else",
        "test_the_update_scope_scales_updates_and_adamw_gradients_by_their_common_norm[1]",
    ),
    (
        "each rank clips by its own norm",
        "dist.all_reduce(total, group=partitions.process_group)",
        "pass",
        "test_the_update_scope_scales_updates_and_adamw_gradients_by_their_common_norm[1]",
    ),
    (
        "an exempt Muon is measured all the same",
        'if is_muon and self._scope == "muon_exempt":',
        "if is_muon and not self._scope:",
        "test_an_exempt_muon_leaves_adamws_gradients_to_their_own_norm[1]",
    ),
    (
        "DeepSpeed clips as well",
        "self._host.partitions.zero.clip_grad = 0.0",
        "pass",
        "test_an_exempt_muon_leaves_adamws_gradients_to_their_own_norm[1]",
    ),
)

KEPT_GRADIENTS = _mutants(
    "zero/layout.py",
    REAL + "test_offload.py::",
    (
        "offload keeps what a discarded step left",
        "gradient.zero_()",
        "pass",
        "test_what_a_discarded_step_left_is_no_later_steps_gradient[1]",
    ),
    (
        "stage 3 keeps an idle parameter's gradient",
        "self.zero.grad_partitions_flat_buffer.zero_()",
        "pass",
        "test_what_a_discarded_step_left_is_no_later_steps_gradient[3]",
    ),
)

CONSOLIDATED = _mutants(
    "zero/consolidated.py",
    REAL + "test_consolidated.py::",
    (
        "a checkpoint loses the second moments",
        '("exp_avg", "exp_avg_sq")',
        '("exp_avg",)',
        "test_the_same_set_up_goes_on_to_the_last_bit_after_a_discarded_step[1]",
    ),
    (
        "a resumed AdamW counts from zero",
        '["step"].fill_(steps.pop())',
        '["step"].fill_(0.0)',
        "test_the_same_set_up_goes_on_to_the_last_bit_after_a_discarded_step[1]",
    ),
    (
        "the model keeps the weights it was built with",
        "        partitions.publish_weights()\n",
        "",
        "test_the_same_set_up_goes_on_to_the_last_bit_after_a_discarded_step[1]",
    ),
    (
        "a resumed run forgets its loss scaler",
        'if manifest["loss_scaler"] is not None and scaler.dynamic:',
        'if manifest["loss_scaler"] is None and scaler.dynamic:',
        "test_the_same_set_up_goes_on_to_the_last_bit_after_a_discarded_step[1]",
    ),
)

MUTANTS = (
    *NEWTON_SCHULZ,
    *LARGE_MATRICES,
    *MUON,
    *PARAMETERS,
    *LAYOUT,
    *PLANNING,
    *EXCHANGE,
    *OPTIMIZER,
    *ORDERINGS,
    *PRECISION,
    *CLIPPING,
    *KEPT_GRADIENTS,
    *CONSOLIDATED,
)
